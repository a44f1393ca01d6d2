"""Random trees: an attached tree is the same as the loaded one, or the export refuses."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings, strategies as st
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.trees import Helper, Mode, Pair, Slotted, Weight, a_weight_loader, fill, fresh, noise
from weightcache.errors import ExportRefused

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64)
SHAPES = ((), (0,), (3,), (4, 6), (2, 0), (2, 3, 4), (1,))


class Tree:
    """Picks things of a model by number."""

    def __init__(self, model: nn.Module, chooser: random.Random) -> None:
        self.model = model
        self.chooser = chooser
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def module(self) -> nn.Module:
        return self.chooser.choice(list(self.model.modules()))

    def empty(self) -> torch.Tensor:
        dtype, shape = self.chooser.choice(DTYPES), self.chooser.choice(SHAPES)
        return torch.zeros(shape, dtype=dtype)

    def held(self, kind: type) -> Any:
        """Any value of a class that an attribute of any module holds, or None."""
        found = [v for m in self.model.modules() for n, v in vars(m).items() if type(v) is kind and n[0] in "nl"]
        return self.chooser.choice(found) if found else None

    def parameter(self) -> tuple[nn.Module, str, nn.Parameter] | None:
        found = [(m, name, p) for m in self.model.modules() for name, p in m._parameters.items() if p is not None]
        return self.chooser.choice(found) if found else None


def construct(model: nn.Module, seed: int, size: int) -> None:
    """Make a random tree; the same for the same numbers, on any device."""
    tree = Tree(model, random.Random(seed))
    for _ in range(size):
        module, name = tree.module(), tree.name()
        match tree.chooser.randrange(13):
            case 0:
                module.add_module(name, nn.Module())
            case 1:
                other = tree.module()
                if module not in list(other.modules()):
                    module.add_module(name, other)
            case 2 | 3:
                module.register_parameter(name, nn.Parameter(tree.empty(), requires_grad=False))
            case 4:
                module.register_parameter(name, Weight(tree.empty(), output_dim=0, weight_loader=a_weight_loader))
            case 5:
                if (found := tree.parameter()) is not None:
                    module.register_parameter(name, found[2])
            case 6:
                module.register_buffer(name, tree.empty(), persistent=tree.chooser.random() < 0.5)
            case 7:
                setattr(module, name, tree.empty())
            case 8:
                setattr(module, name, Helper(w=tree.empty(), mode=Mode.PLAIN, inner=Helper(n=1)))
            case 9:
                setattr(module, name, [tree.empty(), 1, (tree.empty(), "x")])
            case 10:
                setattr(module, name, {"a": tree.empty(), 3: [1], "p": Pair(tree.empty(), 2)})
            case 11:
                setattr(module, name, tree.held(tree.chooser.choice((Helper, list, dict))))
            case _:
                setattr(module, name, tree.chooser.choice((1, 2.5, "x", None, True, torch.int8, Mode.PLAIN, Slotted())))


def set_parameter(tree: Tree, change: Callable[[nn.Module, str, nn.Parameter], None]) -> None:
    if (found := tree.parameter()) is not None:
        change(*found)


def load(model: nn.Module, seed: int, size: int) -> None:
    """Change a tree at random, as loading and post-processing might."""
    tree = Tree(model, random.Random(seed))
    for _ in range(size):
        with contextlib.suppress(TypeError, KeyError):  # what torch itself does not let anybody do
            change_one(tree)


def change_one(tree: Tree) -> None:
    module = tree.module()
    name = tree.chooser.choice(("l", "n")) + tree.name()[1:]  # new, or perhaps one that construction made
    helper, items, table = tree.held(Helper), tree.held(list), tree.held(dict)
    new = noise(tree.empty())
    match tree.chooser.randrange(22):
        case 0:
            set_parameter(tree, lambda m, n, p: setattr(p, "data", new))
        case 1:
            set_parameter(tree, lambda m, n, p: delattr(m, n))
        case 2:
            set_parameter(tree, lambda m, n, p: setattr(m, n, None))
        case 3:
            set_parameter(tree, lambda m, n, p: setattr(module, name, p))
        case 4:
            set_parameter(tree, lambda m, n, p: setattr(module, name, p.data.t() if p.dim() == 2 else p.data))
        case 5:
            set_parameter(tree, lambda m, n, p: setattr(m, n, nn.Parameter(p.data[1:] if p.dim() else p.data, False)))
        case 6:
            set_parameter(tree, lambda m, n, p: setattr(p, "format_ue8m0", True))
        case 7:
            setattr(module, name, nn.Parameter(new, requires_grad=False))
        case 8:
            module.register_buffer(name, new, persistent=False)
        case 9:
            setattr(module, name, new.expand(3, *new.shape))
        case 10 if helper:
            helper.w = new
        case 11 if helper:
            helper.mode, helper.inner.n = Mode.PACKED, 5
        case 12 if helper:
            helper.extra = [new, {"k": helper.w}]
        case 13 if items:
            items.append(new)
        case 14 if items:
            items.pop()
        case 15 if table:
            table["later"] = (new, 1)
        case 16 if table:
            table.pop("a", None)
        case 17:
            setattr(module, name, tree.chooser.choice((helper, items, table)))
        case 18:
            setattr(module, name, tree.chooser.choice(([], (1, new), {"x": {1, 2}}, torch.Size([1, 2]))))
        case 19:
            for old in [n for n, v in vars(module).items() if n.startswith("n")][:1]:
                delattr(module, old)
        case 20:
            for old in [n for n, v in vars(module).items() if isinstance(v, bool | int | str | float)][1:2]:
                setattr(module, old, "changed" if old.startswith("n") else vars(module)[old])
        case 21 if tree.chooser.random() < 0.2:
            setattr(module, name, lambda new=new: new)
        case _:
            pass


def generated(build: int, size: int, change: int, changes: int) -> type[nn.Module]:
    """A model class for these numbers."""

    class Generated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            construct(self, build, size)

        def load(self) -> None:
            fill(self)
            load(self, change, changes)

    return Generated


numbers = st.integers(0, 2**32)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(numbers, st.integers(0, 25), numbers, st.integers(0, 8))
def test_attached_is_the_same_or_refused(build: int, size: int, change: int, changes: int) -> None:
    make = generated(build, size, change, changes)
    try:
        published = way.publish(make)
    except ExportRefused as error:
        event(f"refused: {type(error).__name__}")
        return
    way.attach(published, make).check()
    published.region.close()


def test_most_random_trees_attach() -> None:
    """Refusing everything would be no success."""
    seen: Counter[str] = Counter()
    for number in range(40):
        make = generated(number, 15, number, 5)
        try:
            way.attach(way.publish(make), make).check()
        except ExportRefused:
            seen["refused"] += 1
        else:
            seen["attached"] += 1
    assert seen["attached"] > seen["refused"] > 0


def test_fresh_tensors_differ() -> None:
    """Equal content would hide exchanged tensors."""
    assert fresh(50).tolist() != fresh(50).tolist()
