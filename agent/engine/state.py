"""What this process knows about its weights. One value, changed by the load and read by the hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from weightcache.engine.lease import Lease
    from weightcache.engine.rebuild import Rebuilt
    from weightcache.loader.export import Known
    from weightcache.loader.publication import Publication
    from weightcache.memory import Region, WritableRegion


@dataclass(slots=True)
class ProcessState:
    """``keep`` holds mappings for ever: the model's tensors point into them. ``resident_bytes`` by role. ``capturing``:
    a graph is captured now, between two requests. ``rejoined``: the load whose ranks this launch completes again.
    """

    rebuilt: dict[str, Rebuilt] = field(default_factory=dict)
    exported: Known | None = None
    keep: list[Region | WritableRegion | torch.Tensor] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    publication: Publication | None = None
    rejoined: str = ""
    resident_bytes: dict[str, int] = field(default_factory=dict)
    shares_weights: bool = False
    capturing: bool = False


process = ProcessState()
