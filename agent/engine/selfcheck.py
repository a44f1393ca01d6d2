"""The loader's own comparison for methods without evidence: what an engine would rebuild, against what was loaded.

It runs where the original is: a second tree is built on ``meta``, bound to the packed arenas, and both inventories are
compared. That shows every tensor, value and alias that the manifest loses. It cannot show what lives outside the model,
such as a switch that loading set in a module of SGLang; two servers compared by ``wcache parity`` do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from weightcache.engine import adapter, inventory
from weightcache.engine.rebuild import rebuild
from weightcache.errors import ExportRefused, WeightcacheError
from weightcache.loader.produce import Check
from weightcache.manifest import Manifest
from weightcache.parity.inventory import Inventory, compare


def prepare(model: nn.Module, build: Callable[[], nn.Module]) -> Check:
    """Take the inventory of ``model`` as loading left it; ``build`` makes another one on ``meta``.

    The check raises ExportRefused with the first place that differs.
    """
    loaded = _inventory(model)

    def check(body: Manifest, base: torch.Tensor) -> None:
        with adapter.apart():
            rebuilt = build()
        try:
            rebuild(rebuilt, body, base)
        except WeightcacheError as error:
            raise ExportRefused(f"an engine could not rebuild this model: {error}") from None
        deviations = list(compare(loaded, _inventory(rebuilt.eval())))
        if deviations:
            first = deviations[0]
            raise ExportRefused(
                f"an engine would not get what was loaded: {len(deviations)} places differ, the first is {first.path} "
                f"({first.what}: {first.disk:.100} and {first.attached:.100})"
            )

    return check


def _inventory(model: nn.Module) -> Inventory:
    return inventory.take(model, role="", rank=adapter.global_rank(), version="", capability="")
