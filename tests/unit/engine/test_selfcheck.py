"""What an engine would rebuild is compared with what was loaded, before it is published."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.parity.test_inventory import Layer
from weightcache import manifest
from weightcache.engine import adapter, selfcheck
from weightcache.errors import ExportRefused
from weightcache.loader.export import export
from weightcache.loader.pack import pack
from weightcache.loader.produce import Check
from weightcache.loader.walk import walk
from weightcache.manifest import Manifest
from weightcache.memory import arena_sizes
from weightcache.memory.host import HostMemory


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang would say."""
    monkeypatch.setattr(adapter, "global_rank", lambda: 0)
    monkeypatch.setattr(adapter, "apart", contextlib.nullcontext)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Layer()


@pytest.fixture
def packed() -> tuple[Check, Manifest, torch.Tensor]:
    """A loaded layer's check, and what an agent would get of it."""
    model: Any = Layer()
    built = walk(model).without_tensors()
    model.load()
    check = selfcheck.prepare(model, on_meta)
    done = export(model, built, way.CPU)
    memory = HostMemory()
    sizes = arena_sizes(done.manifest.bytes, memory.granularity, way.ARENA)
    region = memory.reserve(sum(sizes))
    pack(done, region, sizes, keep_private=False)
    body = manifest.decode(manifest.encode(done.manifest))
    return check, body, region.bytes_at(0, body.bytes)


def test_what_is_the_same_passes(packed: tuple[Check, Manifest, torch.Tensor]) -> None:
    check, body, base = packed
    assert len(body.tensors) > 5
    check(body, base)


def test_one_bit_that_is_lost(packed: tuple[Check, Manifest, torch.Tensor]) -> None:
    check, body, base = packed
    base[body.storages[0].offset] ^= 1
    with pytest.raises(ExportRefused, match=r"would not get what was loaded: .* the first is weight \(sha256: "):
        check(body, base)


@pytest.mark.parametrize(("table", "path"), [("scalars", "packed"), ("removed", "scale")])
def test_a_row_that_is_lost(packed: tuple[Check, Manifest, torch.Tensor], table: str, path: str) -> None:
    check, body, base = packed
    assert getattr(body, table)
    with pytest.raises(ExportRefused, match=path):
        check(dataclasses.replace(body, **{table: ()}), base)


def test_a_manifest_that_does_not_fit(packed: tuple[Check, Manifest, torch.Tensor]) -> None:
    check, body, base = packed
    assert body.containers
    with pytest.raises(ExportRefused, match="an engine could not rebuild this model"):
        check(dataclasses.replace(body, containers=()), base)
