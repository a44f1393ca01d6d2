"""A model through the whole way: construct, load, export, encode, pack, freeze, map, construct on meta, rebuild."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.unit.export.compare import Comparison, Snapshot, compare, placement, snapshot
from weightcache import manifest
from weightcache.engine.rebuild import Rebuilt, rebuild
from weightcache.loader.export import Export, Known, export
from weightcache.loader.pack import pack
from weightcache.loader.walk import walk
from weightcache.manifest import Manifest
from weightcache.memory import Region, WritableRegion, arena_sizes
from weightcache.memory.host import HostMemory

CPU = torch.device("cpu")
ARENA = 64 * 1024


@dataclass
class Published:
    """A loaded model, its export, and the mapping that an engine has of it."""

    model: Any
    manifest: Manifest
    exported: Export
    before: Snapshot
    writable: WritableRegion
    region: Region

    @property
    def base(self) -> torch.Tensor:
        return self.region.bytes_at(0, self.manifest.bytes)


@dataclass
class Attached:
    """What became of a published model in an engine."""

    published: Published
    model: Any
    rebuilt: Rebuilt
    comparison: Comparison
    misplaced: list[str]

    def check(self) -> None:
        """Raise AssertionError with everything that differs."""
        assert self.comparison.problems == []
        assert self.misplaced == []


def exported(model: Any, known: Known | None = None) -> Export:
    """Load ``model`` and export it."""
    built = walk(model).without_tensors()
    model.load()
    return export(model, built, CPU, known)


def publish(make: Callable[[], nn.Module], known: Known | None = None, *, keep_private: bool = False) -> Published:
    """Everything up to the mapping in an engine."""
    model = make()
    done = exported(model, known)
    before = snapshot(model)
    body = manifest.decode(manifest.encode(done.manifest))
    assert body == done.manifest
    memory = HostMemory()
    sizes = arena_sizes(body.bytes, memory.granularity, ARENA)
    writable = memory.reserve(sum(sizes))
    pack(done, writable, sizes, keep_private=keep_private)
    fds = writable.freeze()
    region = memory.map(fds, sizes)
    for fd in fds:
        os.close(fd)
    return Published(model, body, done, before, writable, region)


def attach(
    published: Published, make: Callable[[], nn.Module], others: Mapping[str, Rebuilt] | None = None
) -> Attached:
    """Everything that an engine does."""
    with torch.device("meta"):
        model = make()
    rebuilt = rebuild(model, published.manifest, published.base, others)
    comparison = compare(published.model, model, published.before)
    base = published.base
    return Attached(published, model, rebuilt, comparison, placement(comparison, base.data_ptr(), base.numel()))


def roundtrip(make: Callable[[], nn.Module]) -> Attached:
    """Publish and attach, and check that both are the same."""
    attached = attach(publish(make), make)
    attached.check()
    return attached
