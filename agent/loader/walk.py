"""Walk everything that is reachable from a model and say where each tensor and each plain value sits.

``state_dict`` is not enough: post-processing leaves tensors in plain attributes, on helper objects (quantization
methods, dispatchers), in containers and on other tensors. The walk visits registered modules once each (with all their
paths), and from each module its parameters, buffers and attributes, through containers and objects. What it cannot
address for a later rebuild (closures, sets, bound arguments) it still looks into, and a tensor found there is reported
as unplaced rather than missed.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcache import manifest
from weightcache.manifest import Step

MAX_DEPTH = 12
"""Steps from a module to a value; real trees need about five."""

# State of the process or of the launch, never of the weights. Walking on from there would reach everything.
_FOREIGN = (
    "torch.distributed", "torch.cuda", "torch._", "torch.fx", "torch.autograd", "torch.utils",
    "sglang.srt.distributed", "sglang.srt.server_args", "sglang.srt.runtime_context", "sglang.srt.configs",
    "sglang.srt.mem_cache", "sglang.srt.managers", "sglang.srt.model_executor", "sglang.srt.environ",
    "transformers", "logging", "threading", "concurrent", "asyncio", "multiprocessing", "weakref", "_thread",
    "ctypes", "importlib", "inspect", "triton", "numpy",
)  # fmt: skip

_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, str, type(None), torch.dtype)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, property)


@dataclass(frozen=True, slots=True)
class FoundModule:
    """One module object and every path that leads to it, the canonical one first."""

    module: nn.Module
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """One place that holds a tensor. ``module`` indexes Walk.modules; ``reason`` is set when it cannot be addressed."""

    module: int
    place: str
    steps: tuple[Step, ...]
    tensor: torch.Tensor
    reason: str = ""


@dataclass(slots=True)
class Walk:
    """What the walk found. ``scalars`` and ``opaque`` are keyed by (module index, steps)."""

    modules: list[FoundModule] = field(default_factory=list)
    tensors: list[FoundTensor] = field(default_factory=list)
    scalars: dict[tuple[int, tuple[Step, ...]], Any] = field(default_factory=dict)
    opaque: dict[tuple[int, tuple[Step, ...]], object] = field(default_factory=dict)
    names: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)
    """(module index, place) → the names registered there, whatever they hold."""

    def path(self, module: int, steps: tuple[Step, ...]) -> str:
        """A readable path such as ``model.layers.0.mlp.experts.quant_method.workspace``."""
        text = self.modules[module].paths[0]
        for kind, step in steps:
            text += f".{step}" if kind == "attr" else f"[{step!r}]"
        return text.lstrip(".")


def walk(model: nn.Module) -> Walk:
    """Walk ``model``. The order is deterministic: registration order, depth first."""
    found = Walk(modules=find_modules(model))
    registered = {id(entry.module) for entry in found.modules}
    seen: dict[int, object] = {}
    for index, entry in enumerate(found.modules):
        _walk_module(found, index, entry.module, registered, seen)
    return found


def find_modules(model: nn.Module) -> list[FoundModule]:
    """Every registered module once. A module reached again gets another path, but is not descended into again."""
    order: list[nn.Module] = []
    paths: dict[int, list[str]] = {}

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in paths:
            paths[id(module)].append(path)
            return
        paths[id(module)] = [path]
        order.append(module)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return [FoundModule(module, tuple(paths[id(module)])) for module in order]


def _walk_module(found: Walk, index: int, module: nn.Module, registered: set[int], seen: dict[int, object]) -> None:
    found.names[index, manifest.PARAMETER] = tuple(module._parameters)
    found.names[index, manifest.BUFFER] = tuple(module._buffers)
    found.names[index, manifest.ATTRIBUTE] = tuple(name for name in vars(module) if name not in _MODULE_INTERNALS)
    visitor = _Visitor(found, index, registered, seen)
    for name, parameter in module._parameters.items():
        visitor.visit(parameter, manifest.PARAMETER, (("attr", name),))
    for name, buffer in module._buffers.items():
        transient = name in module._non_persistent_buffers_set
        visitor.visit(buffer, manifest.TRANSIENT_BUFFER if transient else manifest.BUFFER, (("attr", name),))
    for name in found.names[index, manifest.ATTRIBUTE]:
        visitor.visit(vars(module)[name], manifest.ATTRIBUTE, (("attr", name),))


class _Visitor:
    """Visits values below one module."""

    def __init__(self, found: Walk, index: int, registered: set[int], seen: dict[int, object]) -> None:
        self.found = found
        self.index = index
        self.registered = registered
        # Objects by id, kept alive so that an id is never used twice; shared between modules, so that a helper that
        # several layers hold is walked from the first one only.
        self.seen = seen

    def visit(self, value: object, place: str, steps: tuple[Step, ...], unplaced: str = "") -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value, place, steps, unplaced)
        elif isinstance(value, _SCALARS):
            self.found.scalars[self.index, steps] = value
        elif isinstance(value, nn.Module) and id(value) in self.registered:
            return
        elif id(value) in self.seen:
            return
        elif len(steps) > MAX_DEPTH:
            self.found.opaque[self.index, steps] = value
        else:
            self.seen[id(value)] = value
            self._inside(value, place, steps, unplaced)

    def _tensor(self, tensor: torch.Tensor, place: str, steps: tuple[Step, ...], unplaced: str) -> None:
        self.found.tensors.append(FoundTensor(self.index, place, steps, tensor, unplaced))
        if id(tensor) in self.seen:
            return
        self.seen[id(tensor)] = tensor
        for name, value in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
            if isinstance(value, torch.Tensor):
                unplaced = unplaced or "it is an attribute of another tensor"
            self.visit(value, manifest.ATTRIBUTE, (*steps, ("attr", name)), unplaced)

    def _inside(self, value: object, place: str, steps: tuple[Step, ...], unplaced: str) -> None:
        visit = functools.partial(self.visit, place=place)
        match value:
            case dict():
                for key, item in list(value.items()):
                    plain = isinstance(key, str) or type(key) is int
                    reason = unplaced or ("" if plain else "its dictionary key is no plain value")
                    visit(item, steps=(*steps, ("key", key if plain else repr(key))), unplaced=reason)
            case list() | tuple() | deque():
                for position, item in enumerate(list(value)):
                    visit(item, steps=(*steps, ("item", position)), unplaced=unplaced)
            case set() | frozenset():
                for position, item in enumerate(list(value)):
                    visit(item, steps=(*steps, ("item", position)), unplaced=unplaced or "it is in a set")
            case _:
                self._object(value, place, steps, unplaced)

    def _object(self, value: object, place: str, steps: tuple[Step, ...], unplaced: str) -> None:
        if isinstance(value, functools.partial | types.FunctionType | types.MethodType):
            for name, item in _held_by_code(value):
                self.visit(item, place, (*steps, ("attr", name)), unplaced or "it is bound inside a function")
            return
        self.found.opaque[self.index, steps] = value
        if isinstance(value, _CODE) or _is_foreign(type(value)):
            return
        for name, item in _attributes(value):
            self.visit(item, place, (*steps, ("attr", name)), unplaced)


def _held_by_code(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield "args", value.args
        yield "keywords", value.keywords
    elif isinstance(value, types.MethodType):
        # A bound method of a module or helper that is reached elsewhere is no place of its own.
        return
    else:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            if isinstance(content, torch.Tensor | list | tuple | dict | functools.partial):
                yield name, content


def _is_foreign(cls: type) -> bool:
    name = cls.__module__
    return any(name == prefix or name.startswith(f"{prefix}." if prefix[-1] != "_" else prefix) for prefix in _FOREIGN)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            try:
                yield name, getattr(value, name)
            except AttributeError:
                continue
