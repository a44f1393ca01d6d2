"""Whether two module trees are the same, written from what an engine can observe and not from how weightcache walks.

``differences`` follows both trees at once. Two objects correspond when they are reached by the same way, and an object
must correspond to the same one on every way (so tied weights, shared modules and shared lists stay shared).
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, str, type(None), bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Facts:
    """A tensor's memory and value before anything was packed."""

    storage: int
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    data: bytes


Snapshot = dict[str, Facts]


def snapshot(model: nn.Module) -> Snapshot:
    """Note the memory of every tensor. Packing moves tensors, and must not move what it is compared with."""
    comparison = Comparison()
    comparison.visit(model, model, "")
    return {path: facts(tensor) for path, (tensor, _) in comparison.tensors.items()}


def facts(tensor: torch.Tensor) -> Facts:
    """What a tensor is now."""
    return Facts(
        tensor.untyped_storage().data_ptr(),
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        raw(tensor),
    )


@dataclass
class Comparison:
    """Pairs of tensors by path, and everything that differs."""

    problems: list[str] = field(default_factory=list)
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    there: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)
    before: Snapshot | None = None

    def say(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text}")

    def known(self, a: object, b: object, path: str) -> bool:
        """Note that ``a`` corresponds to ``b``; true when that was known."""
        if id(a) in self.there or id(b) in self.back:
            if self.there.get(id(a)) != id(b) or self.back.get(id(b)) != id(a):
                self.say(path, "another object than at the other places")
            return True
        self.there[id(a)], self.back[id(b)] = id(b), id(a)
        self.alive += [a, b]
        return False

    def visit(self, a: Any, b: Any, path: str) -> None:
        if type(a) is not type(b):
            self.say(path, f"{type(a).__name__} against {type(b).__name__}")
        elif isinstance(a, PLAIN):
            if repr(a) != repr(b):
                self.say(path, f"{a!r} against {b!r}")
        elif isinstance(a, type | types.FunctionType | types.BuiltinFunctionType):
            if a.__qualname__ != b.__qualname__:
                self.say(path, f"{a} against {b}")
        elif self.known(a, b, path) and not isinstance(a, torch.Tensor):
            return
        elif isinstance(a, torch.Tensor):
            self.tensor(a, b, path)
        elif isinstance(a, nn.Module):
            self.module(a, b, path)
        elif isinstance(a, dict):
            self.same(list(a), list(b), path, "keys")
            for key in a:
                if key in b:
                    self.visit(a[key], b[key], f"{path}[{key!r}]")
        elif isinstance(a, list | tuple | deque):
            self.same(len(a), len(b), path, "length")
            for index, (one, other) in enumerate(zip(a, b, strict=False)):
                self.visit(one, other, f"{path}[{index}]")
        elif isinstance(a, set | frozenset):
            self.same(sorted(map(repr, a)), sorted(map(repr, b)), path, "items")
        else:
            self.object(a, b, path)

    def same(self, a: object, b: object, path: str, what: str) -> None:
        if a != b:
            self.say(path, f"{what}: {a} against {b}")

    def object(self, a: Any, b: Any, path: str) -> None:
        ours, theirs = dict(attributes(a)), dict(attributes(b))
        self.same(sorted(ours), sorted(theirs), path, "attributes")
        for name in ours:
            if name in theirs:
                self.visit(ours[name], theirs[name], f"{path}.{name}")

    def module(self, a: nn.Module, b: nn.Module, path: str) -> None:
        for table in ("_parameters", "_buffers", "_modules"):
            ours, theirs = getattr(a, table), getattr(b, table)
            self.same(list(ours), list(theirs), path, f"the order in {table}")
            for name in ours:
                if table == "_buffers":
                    self.buffers.add(f"{path}.{name}")
                if name in theirs:
                    self.visit(ours[name], theirs[name], f"{path}.{name}")
        self.same(a._non_persistent_buffers_set, b._non_persistent_buffers_set, path, "buffers that are not persistent")
        internal = set(vars(nn.Module())) - {"training"}
        ours, theirs = ({name: value for name, value in vars(one).items() if name not in internal} for one in (a, b))
        self.same(sorted(ours), sorted(theirs), path, "attributes")
        for name in ours:
            if name in theirs:
                self.visit(ours[name], theirs[name], f"{path}.{name}")

    def tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        first = not any(one is a for one, _ in self.tensors.values())
        self.tensors[path] = (a, b)
        if not first:
            return
        if b.is_meta:
            self.say(path, "on meta")
            return
        for what in ("requires_grad", "is_leaf"):
            self.same(getattr(a, what), getattr(b, what), path, what)
        for one in (a, b):
            now, before = facts(one), self.was(path, a)
            for what in ("shape", "stride", "dtype"):
                self.same(getattr(before, what), getattr(now, what), path, what)
            if before.data != now.data:
                self.say(path, "other bytes")
        self.same(sorted(vars(a)), sorted(vars(b)), path, "attributes of the tensor")
        for name, value in vars(a).items():
            if name in vars(b):
                self.visit(value, vars(b)[name], f"{path}.{name}")

    def was(self, path: str, tensor: torch.Tensor) -> Facts:
        """A tensor of the original before it was packed."""
        return facts(tensor) if self.before is None else self.before[path]

    def memory(self) -> None:
        """Tensors share memory in one tree exactly as in the other."""
        pairs = list(self.tensors.items())
        for index, (path, (a, b)) in enumerate(pairs):
            for other_path, (c, d) in pairs[:index]:
                if a is c or a.numel() == 0 or c.numel() == 0 or b.is_meta or d.is_meta:
                    continue
                one, other = self.was(path, a), self.was(other_path, c)
                if one.storage == other.storage:
                    self.same(one.address - other.address, b.data_ptr() - d.data_ptr(), path, f"from {other_path}")
                elif overlap(b, d):
                    self.say(path, f"shares memory with {other_path}")


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that ``tensor`` touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors touch a common address range."""
    return max(extent(a)[0], extent(b)[0]) < min(extent(a)[1], extent(b)[1])


def attributes(value: object) -> Iterator[tuple[str, object]]:
    """Everything that is set on an object."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:
                    continue


def compare(original: nn.Module, rebuilt: nn.Module, before: Snapshot | None = None) -> Comparison:
    """Compare two trees; ``before`` is the snapshot of the original before it was packed."""
    comparison = Comparison(before=before)
    comparison.visit(original, rebuilt, "")
    comparison.memory()
    return comparison


def placement(comparison: Comparison, start: int, size: int) -> list[str]:
    """Weights lie in the read-only mapping; named buffers and everything beside the weights do not."""
    problems = []
    weights, private = set(), set()
    for path, (a, _) in comparison.tensors.items():
        storage = comparison.was(path, a).storage
        if isinstance(a, nn.Parameter):
            weights.add(storage)
        if path in comparison.buffers:
            private.add(storage)
    for path, (a, b) in comparison.tensors.items():
        if a.numel() == 0 or b.is_meta:
            continue
        low, high = extent(b)
        inside = start <= low and high <= start + size
        outside = high <= start or start + size <= low
        storage = comparison.was(path, a).storage
        if not (inside if storage in weights - private else outside):
            problems.append(f"{path} is {'shared' if inside else 'private'}")
    return problems
