"""A model looked through once: the same modules and paths as the walk finds, and all that is on meta."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.trees import Helper, fill
from weightcache import manifest
from weightcache.engine import rebuild as rebuilding
from weightcache.engine.rebuild import rebuild
from weightcache.engine.tree import look_through
from weightcache.errors import AttachFailed
from weightcache.loader.walk import class_name, find_modules


class Shared(nn.Module):
    """A module with three paths, a cycle, a missing child, and tensors of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.gone: nn.Module | None = None
        self.register_module("none", None)
        self.second = nn.ModuleList([self.first, self.first[0]])
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first[0].weight
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("absent", None)
        self.loose = torch.zeros(2)
        self.helper = Helper(w=torch.zeros(2))

    def load(self) -> None:
        fill(self)
        self.loose = torch.ones(2)
        self.helper.w = torch.ones(2)


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def with_cycle() -> nn.Module:
    model = Shared()
    model.second.add_module("up", model)
    return model


@pytest.mark.parametrize("make", [Shared, with_cycle, nn.Module, lambda: nn.Linear(2, 2)])
def test_the_modules_are_those_of_the_walk_in_its_order(make: Callable[[], nn.Module]) -> None:
    model = make()
    tree, found = look_through(model), find_modules(model)
    assert [id(module) for module in tree.modules] == [id(entry.module) for entry in found]
    assert tree.paths == [entry.paths for entry in found]
    assert tree.classes == [class_name(type(entry.module)) for entry in found]
    assert tree.by_path == {path: entry.module for entry in found for path in entry.paths}
    for module, own, parameters, buffers in zip(tree.modules, tree.own, tree.parameters, tree.buffers, strict=True):
        assert vars(module) is own
        assert module._parameters is parameters
        assert module._buffers is buffers


def test_every_place_on_meta_is_known() -> None:
    model = on_meta(Shared)
    tree = look_through(model)
    places = [(id(table), name) for table, name in tree.on_meta]
    linear = model.first[0]
    assert places == [
        (id(linear._parameters), "weight"), (id(linear._parameters), "bias"), (id(model.tied._parameters), "weight"),
        (id(model._buffers), "table"), (id(model._buffers), "scratch"), (id(vars(model)), "loose"),
    ]  # fmt: skip
    assert look_through(Shared()).on_meta == []


def test_rows_fit_when_all_is_the_same() -> None:
    rows = way.publish(Shared).manifest.modules
    tree = look_through(on_meta(Shared))
    assert tree.is_of(rows)
    last = rows[-1]
    for other in (
        rows[:-1],
        (*rows, last),
        (*rows[:-1], last._replace(cls="torch.nn.modules.module.Module")),
        (*rows[:-1], last._replace(external="target:tied")),
        (*rows[:-1], last._replace(paths=("tide",))),
        (*rows[:-1], last._replace(paths=(*last.paths, "more"))),
        (rows[0], *reversed(rows[1:])),
        (),
    ):
        assert not tree.is_of(other)


@pytest.fixture
def published() -> way.Published:
    return way.publish(Shared)


def test_a_tree_that_was_looked_through_before_binds_the_same(published: way.Published) -> None:
    model = on_meta(Shared)
    tree = look_through(model)
    rebuilt = rebuild(model, published.manifest, published.base, tree=tree)
    assert rebuilt.modules == tuple(tree.modules)
    assert rebuilt.paths["second.1"] is model.first[0]
    assert model.tied.weight is model.first[0].weight
    assert torch.equal(model.tied.weight, published.model.tied.weight)
    assert look_through(model).on_meta == []
    comparison = way.compare(published.model, model, published.before)
    assert comparison.problems == []


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("place", "text"),
    [("parameter", "no value for first.0.bias"), ("buffer", "no value for table"), ("attribute", "no value for loose")],
)
def test_what_the_set_forgets_is_found(
    monkeypatch: pytest.MonkeyPatch, published: way.Published, place: str, text: str, fits: bool
) -> None:
    """Both ways: where the set's modules are the model's, and where each is looked for."""
    slots = [slot for slot in published.manifest.slots if slot.place == place and len(slot.steps) == 1]
    forgotten = next(slot for slot in slots if slot.steps[0][1] in ("bias", "table", "loose"))
    left = tuple(slot for slot in published.manifest.slots if slot is not forgotten)
    body = manifest.decode(manifest.encode(dataclasses.replace(published.manifest, slots=left)))
    if not fits:
        monkeypatch.setattr(rebuilding.Tree, "is_of", lambda *args: False)
    with pytest.raises(AttachFailed, match=text):
        rebuild(on_meta(Shared), body, published.base)


@pytest.mark.parametrize("fits", [True, False])
def test_a_tensor_on_meta_that_moves_is_found(
    monkeypatch: pytest.MonkeyPatch, published: way.Published, fits: bool
) -> None:
    """A row that gives an attribute the object of another place: here a tensor, for which no row is meant."""
    slots = tuple(slot for slot in published.manifest.slots if slot.steps[0][1] != "helper")
    moved = manifest.Record(0, (("attr", "taken"),), "", 0, (("attr", "helper"), ("attr", "w")))
    body = manifest.decode(manifest.encode(dataclasses.replace(published.manifest, slots=slots, records=(moved,))))
    if not fits:
        monkeypatch.setattr(rebuilding.Tree, "is_of", lambda *args: False)
    with pytest.raises(AttachFailed, match="no value for taken"):
        rebuild(on_meta(Shared), body, published.base)
