"""Packing in a serving engine (which keeps its model) and in a loader (which gives memory back piece by piece)."""

from __future__ import annotations

import ctypes
import os
import signal
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.compare import compare, extent, facts, snapshot
from tests.unit.export.trees import Everything, Rotary, fill
from weightcache.loader.export import export
from weightcache.loader.pack import pack
from weightcache.loader.walk import walk
from weightcache.memory import arena_sizes
from weightcache.memory.host import HostMemory, HostWritableRegion


class Serving(nn.Module):
    """A model that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.workspace = torch.zeros(8)

    def load(self) -> None:
        fill(self)
        self.requires_grad_(False)
        self.head = self.embedding.weight.data.t()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) / 100
        for layer in self.layers:
            hidden = layer(hidden) / 100 + self.rotary.cos_sin_cache.sum()
        self.workspace.copy_(hidden.sum(0))
        return hidden @ self.head


def test_a_donor_keeps_its_objects_and_computes_the_same() -> None:
    model = Serving()
    built = walk(model).without_tensors()
    model.load()
    tokens = torch.tensor([3, 1, 4])
    expected = model(tokens)
    objects = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    private = {"rotary": model.rotary.cos_sin_cache.data_ptr(), "workspace": model.workspace.data_ptr()}
    before = snapshot(model)

    done = export(model, built, way.CPU)
    region = HostMemory().reserve(way.ARENA)
    pack(done, region, [way.ARENA], keep_private=True)
    for fd in region.freeze():
        os.close(fd)

    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == objects
    assert private == {"rotary": model.rotary.cos_sin_cache.data_ptr(), "workspace": model.workspace.data_ptr()}
    assert compare(model, model, before).problems == []
    base = region.bytes_at(0, region.size)
    for tensor in (*model.parameters(), model.head):
        assert base.data_ptr() <= extent(tensor)[0] < extent(tensor)[1] <= base.data_ptr() + region.size
    assert torch.equal(model(tokens), expected)
    assert model.head.data_ptr() == model.embedding.weight.data_ptr()


def test_a_donor_keeps_the_whole_tree() -> None:
    model = Everything()
    built = walk(model).without_tensors()
    model.load()
    before = snapshot(model)
    done = export(model, built, way.CPU)
    sizes = arena_sizes(done.manifest.bytes, HostMemory.granularity, way.ARENA)
    region = HostMemory().reserve(sum(sizes))
    pack(done, region, sizes, keep_private=True)
    assert compare(model, model, before).problems == []


def test_a_donated_set_attaches() -> None:
    published = way.publish(Serving, keep_private=True)
    attached = way.attach(published, Serving)
    attached.check()
    tokens = torch.tensor([3, 1, 4])
    with torch.no_grad():
        assert torch.equal(attached.model(tokens), published.model(tokens))


def died_writing(tensor: torch.Tensor) -> int:
    """The signal that ended a child which writes to ``tensor``."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        tensor.detach().view(-1)[0] = 7
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_nobody_can_write_after_publishing() -> None:
    published = way.publish(Serving, keep_private=True)
    attached = way.attach(published, Serving)
    assert died_writing(attached.model.embedding.weight) == signal.SIGSEGV
    assert died_writing(published.model.embedding.weight) == signal.SIGSEGV, "the donor's own mapping"
    assert died_writing(attached.model.rotary.cos_sin_cache) == 0
    assert died_writing(attached.model.workspace) == 0
    assert died_writing(published.model.workspace) == 0


class Watching(HostWritableRegion):
    """Looks, whenever an arena is made, at what is still alive."""

    def __init__(self, reserved: int, originals: dict[int, tuple[Any, int]]) -> None:
        super().__init__(reserved, HostMemory().free_bytes)
        self.originals = originals
        self.total = sum(size for _, size in originals.values())
        self.peaks: list[int] = []

    def extend(self, size: int) -> None:
        super().extend(size)
        self.peaks.append(self.size + self.alive())

    def alive(self) -> int:
        """Bytes of the originals that some tensor still looks into."""
        return sum(size for owner, size in self.originals.values() if owner() is not None)


def owned(size: int) -> tuple[torch.Tensor, Any]:
    """Float storage, and a reference that dies with it."""
    buffer = (ctypes.c_float * size)()
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    return tensor, weakref.ref(buffer)


class Large(nn.Module):
    """Parameters of several sizes, one of them seen through several views."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(20):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(1), requires_grad=False))

    def load(self) -> None:
        for index, (_, parameter) in enumerate(self.named_parameters()):
            size = 4000 + 5000 * (index % 4)
            parameter.data, owner = owned(size)
            OWNERS[index] = (owner, size * 4)
        self.view = self.p3.data[10:]
        self.register_buffer("table", self.p4.data[5:])


OWNERS: dict[int, tuple[Any, int]] = {}


@pytest.mark.parametrize("keep_private", [False, True])
def test_the_peak_is_the_shard_one_arena_and_the_largest_storage(keep_private: bool) -> None:
    OWNERS.clear()
    model = Large()
    done = way.exported(model)
    sizes = arena_sizes(done.manifest.bytes, HostMemory.granularity, way.ARENA)
    assert len(sizes) > 10
    region = Watching(sum(sizes), dict(OWNERS))
    assert region.alive() == region.total
    pack(done, region, sizes, keep_private=keep_private)
    largest = max(size for _, size in OWNERS.values())
    padding = done.manifest.bytes - region.total
    assert max(region.peaks) <= region.total + way.ARENA + largest + padding
    assert region.alive() == (OWNERS[4][1] if keep_private else 0), "every original is given back"


def test_the_peak_would_show_originals_that_stay() -> None:
    OWNERS.clear()
    model = Large()
    done = way.exported(model)
    kept = [piece.source for piece in done.pieces]
    sizes = arena_sizes(done.manifest.bytes, HostMemory.granularity, way.ARENA)
    region = Watching(sum(sizes), dict(OWNERS))
    pack(done, region, sizes, keep_private=False)
    assert kept
    assert max(region.peaks) > region.total + way.ARENA + max(size for _, size in OWNERS.values()) * 2


def test_facts_tell_tensors_apart() -> None:
    assert facts(torch.zeros(2)) != facts(torch.ones(2))
