"""Inventories: equal exactly when a disk load and an attached model are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.test_property import generated
from tests.unit.export.trees import SEED, Helper, Mode
from weightcache.engine.inventory import take
from weightcache.errors import ExportRefused, ProtocolError
from weightcache.parity import inventory
from weightcache.parity.inventory import Inventory


def both(make: type[nn.Module], seed: int = 1) -> tuple[Any, Any]:
    """A model as a disk load leaves it, and the same model attached."""
    SEED.manual_seed(seed)
    disk: Any = make()
    disk.load()
    SEED.manual_seed(seed)
    return disk, way.attach(way.publish(make), make).model


def of(model: nn.Module) -> Inventory:
    return take(model, role="target", rank=0, version="0", capability="")


class Method:
    """Stands for one of SGLang's."""

    def __init__(self) -> None:
        self.block_quant = False
        self.mode = Mode.PLAIN
        self.scheme = Helper(strategy="tensor")


class Layer(nn.Module):
    """One layer with everything that can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.tied = self.weight
        self.scale = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.inner = nn.Linear(3, 2)
        self.again = self.inner
        self.register_buffer("table", torch.zeros(5), persistent=False)
        self.quant_method = Method()
        self.halves: Any = ()
        self.packed = False

    def load(self) -> None:
        with torch.no_grad():
            for number, tensor in enumerate((*self.parameters(), *self.buffers())):
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number)
        self.weight.data = self.weight.data.t().contiguous().t()
        self.halves = (self.weight.data[:2], self.weight.data[2:])
        self.workspace = torch.ones(8, dtype=torch.int32)
        self.packed = True
        del self.scale


def test_random_trees_are_equal_on_both_sides() -> None:
    compared = 0
    for number in range(60):
        try:
            disk, attached = both(generated(number, 15, number, 5), number)
        except ExportRefused:
            continue
        assert list(inventory.compare(of(disk), of(attached))) == []
        compared += 1
    assert compared > 20


def test_a_layer_is_equal_and_its_inventory_survives_a_file(tmp_path: Path) -> None:
    disk, attached = map(of, both(Layer))
    assert list(inventory.compare(disk, attached)) == []
    assert disk.methods == {f"{__name__}.Method(block_quant=False, mode=PLAIN)": 1}
    assert disk.tensors["weight"].same == disk.tensors["tied"].same == "weight"
    assert disk.tensors["halves[1]"].memory == disk.tensors["halves[0]"].memory == disk.tensors["weight"].memory
    assert disk.tensors["halves[1]"].delta - disk.tensors["halves[0]"].delta == 2 * 4
    inventory.write(tmp_path, disk)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.target.json"]
    assert inventory.read(tmp_path / disk.name) == disk


def renewed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def flip(tensor: torch.Tensor) -> torch.Tensor:
    """One bit, in memory of its own: the mapping is read-only."""
    copy = renewed(tensor)
    copy.view(torch.uint8).view(-1)[-1] ^= 1
    return copy


def parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Any], object], set[tuple[str, str]]]] = {
    "one bit": (lambda m: setattr(m, "workspace", flip(m.workspace)), {("workspace", "sha256")}),
    "another stride": (
        lambda m: setattr(m.inner, "weight", parameter(m.inner.weight.t().contiguous().t())),
        {("inner.weight", "stride")},
    ),
    "another type": (
        lambda m: setattr(m, "workspace", m.workspace.view(torch.float32)),
        {("workspace", "dtype")},
    ),
    "untied": (
        lambda m: setattr(m, "tied", parameter(renewed(m.weight))),
        {("tied", "same")},
    ),
    "no view any more": (
        lambda m: setattr(m, "halves", (m.halves[0], renewed(m.halves[1]))),
        {("halves[1]", "memory"), ("halves[1]", "delta"), ("halves[1]", "stride")},
    ),
    "a tensor too many": (lambda m: m.register_buffer("more", torch.ones(1)), {("more", "tensor")}),
    "a tensor too few": (lambda m: delattr(m, "workspace"), {("workspace", "tensor")}),
    "a buffer that is saved": (
        lambda m: m._non_persistent_buffers_set.discard("table"),
        {("table", "place")},
    ),
    "a parameter that is none": (
        lambda m: (delattr(m, "tied"), setattr(m, "tied", m.weight.data)),
        {("tied", "cls"), ("tied", "place"), ("tied", "same")},
    ),
    "a plain value": (lambda m: setattr(m, "packed", False), {("packed", "value")}),
    "a value of a helper": (
        lambda m: setattr(m.quant_method.scheme, "strategy", 3),
        {("quant_method.scheme.strategy", "value")},
    ),
    "another helper": (lambda m: setattr(m.quant_method, "scheme", Mode), {("quant_method.scheme", "value")}),
    "a module of its own": (lambda m: setattr(m, "again", nn.Linear(3, 2)), {("again.weight", "tensor")}),
    "another class of module": (
        lambda m: setattr(m.inner, "__class__", type("Other", (nn.Linear,), {})),
        {("inner module", "value")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_is_found(change: str) -> None:
    disk, attached = both(Layer)
    alter, expected = CHANGES[change]
    alter(attached)
    found = {(deviation.path, deviation.what) for deviation in inventory.compare(of(disk), of(attached))}
    assert expected & found, found
    assert {(d.path, d.what) for d in inventory.compare(of(attached), of(disk))} & expected


def test_another_method_is_found_by_its_switches() -> None:
    disk, attached = both(Layer)
    attached.quant_method.block_quant = True
    found = list(inventory.compare(of(disk), of(attached)))
    assert {deviation.path for deviation in found} == {"", "quant_method.block_quant"}
    assert sorted((d.disk, d.attached) for d in found if not d.path) == [
        ("0 layers", "1 layers"),
        ("1 layers", "0 layers"),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', "\x00"])
def test_a_file_that_is_no_inventory(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0.target.json"
    path.write_text(text)
    with pytest.raises(ProtocolError, match="no inventory"):
        inventory.read(path)
