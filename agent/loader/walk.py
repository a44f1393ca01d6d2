"""Walk everything that is reachable from a model and say where each tensor and each plain value sits.

``state_dict`` is not enough: post-processing leaves tensors in plain attributes, on helper objects (quantization
methods, dispatchers), in containers and on other tensors. The walk visits registered modules once each (with all their
paths), and from each module its parameters, buffers and attributes, through containers and objects. What it cannot
address for a later rebuild (closures, sets, bound arguments) it still looks into, and a tensor found there is reported
as unplaced rather than missed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightcache import manifest
from weightcache.errors import ExportRefused
from weightcache.manifest import Step

MAX_DEPTH = 12
"""Steps from a module to a value that can be carried; real trees need about five."""

SEARCH_DEPTH = 40
"""Steps down to which a tensor is still found, to be reported as unplaced."""

# State of the process or of the launch, never of the weights. Walking on from there would reach everything.
_FOREIGN = (
    "torch.distributed", "torch.cuda", "torch._", "torch.fx", "torch.autograd", "torch.utils",
    "sglang.srt.distributed", "sglang.srt.server_args", "sglang.srt.runtime_context", "sglang.srt.configs",
    "sglang.srt.mem_cache", "sglang.srt.managers", "sglang.srt.model_executor", "sglang.srt.environ",
    "transformers", "logging", "threading", "concurrent", "asyncio", "multiprocessing", "weakref", "_thread",
    "ctypes", "importlib", "inspect", "triton", "numpy",
)  # fmt: skip

MODULE_INTERNALS = frozenset(vars(nn.Module()))
"""What torch itself keeps in the ``__dict__`` of every module."""

LEFT_OUT = frozenset({"routed_experts_weights_of_layer"})
"""Attributes of modules that only expert rebalancing reads, which weightcache refuses.

Some models make it while they load, as a function of the whole model, which no manifest can carry.
"""

# Values without parts. Only some of them can travel (see export), but a change of any of them is seen.
_VALUES = (
    bool, int, float, str, type(None), torch.dtype, enum.Enum, bytes, complex, range, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_FUNCTIONS = (functools.partial, types.FunctionType, types.MethodType)
_CODE = (types.BuiltinFunctionType, types.ModuleType, type, property)

Place = tuple[int, tuple[Step, ...]]
"""(index of the module in Walk.modules, steps from it)."""


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
    """What the walk found, keyed by place. An object that several places hold is walked from the first one."""

    modules: list[FoundModule] = field(default_factory=list)
    tensors: list[FoundTensor] = field(default_factory=list)
    scalars: dict[Place, Any] = field(default_factory=dict)
    containers: dict[Place, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Class and keys (dict), positions (list, tuple, deque) or items (set)."""
    objects: dict[Place, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Helper objects, functions and classes: what they are, and the names of their attributes."""
    aliases: dict[Place, Place | str] = field(default_factory=dict)
    """Places that lead to an object that another place holds already, or (by its path) to a registered module."""
    names: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)
    """(module index, place) → the names registered there, whatever they hold."""

    def path(self, module: int, steps: tuple[Step, ...]) -> str:
        """A readable path such as ``model.layers.0.mlp.experts.quant_method.workspace``."""
        text = self.modules[module].paths[0]
        for kind, step in steps:
            text += f".{step}" if kind == "attr" else f"[{step!r}]"
        return text.lstrip(".")

    def without_tensors(self) -> Walk:
        """The same walk, keeping no tensor alive: loading replaces many, and their memory must go."""
        nothing = torch.empty(0, device="cpu")
        return dataclasses.replace(self, tensors=[dataclasses.replace(t, tensor=nothing) for t in self.tensors])


def walk(model: nn.Module) -> Walk:
    """Walk ``model``. The order is deterministic: registration order, depth first."""
    found = Walk(modules=find_modules(model))
    registered = {id(entry.module): entry.paths[0] for entry in found.modules}
    visitor = _Visitor(found, registered)
    for index, entry in enumerate(found.modules):
        visitor.module(index, entry.module)
    visitor.unplaced()
    return found


def find_modules(model: nn.Module) -> list[FoundModule]:
    """Every registered module once. A module reached again gets another path, but is not descended into again."""
    order: list[nn.Module] = []
    paths: dict[int, list[str]] = {}
    pending = [(model, "")]
    while pending:
        module, path = pending.pop()
        if id(module) in paths:
            paths[id(module)].append(path)
            continue
        paths[id(module)] = [path]
        order.append(module)
        children = [(child, f"{path}.{name}" if path else name) for name, child in module._modules.items()]
        pending += [(child, path) for child, path in reversed(children) if child is not None]
    return [FoundModule(module, tuple(paths[id(module)])) for module in order]


def switches() -> Iterator[manifest.Switch]:
    """The values of manifest.SWITCHES in this process, as far as their modules are loaded."""
    for place, name in manifest.SWITCHES:
        held = getattr(sys.modules.get(place), name, {})
        for key, value in sorted(held.items()):
            yield manifest.Switch(place, name, key, value)


class _Visitor:
    """Visits values below one module at a time."""

    def __init__(self, found: Walk, registered: dict[int, str]) -> None:
        self.found = found
        self.registered = registered
        self.index = 0
        # Objects by id, kept alive so that an id is never used twice, with the place that was first.
        self.seen: dict[int, tuple[object, Place]] = {}
        # What cannot be addressed is looked at last, when everything that has a place is known.
        self.later: list[tuple[int, object, str, tuple[Step, ...], str]] = []

    def module(self, index: int, module: nn.Module) -> None:
        self.index = index
        names = self.found.names
        names[index, manifest.PARAMETER] = tuple(module._parameters)
        names[index, manifest.BUFFER] = tuple(module._buffers)
        names[index, manifest.ATTRIBUTE] = tuple(
            name for name in vars(module) if name not in MODULE_INTERNALS and name not in LEFT_OUT
        )
        for name, parameter in module._parameters.items():
            self.visit(parameter, manifest.PARAMETER, (("attr", name),))
        for name, buffer in module._buffers.items():
            transient = name in module._non_persistent_buffers_set
            self.visit(buffer, manifest.TRANSIENT_BUFFER if transient else manifest.BUFFER, (("attr", name),))
        for name in names[index, manifest.ATTRIBUTE]:
            self.visit(vars(module)[name], manifest.ATTRIBUTE, (("attr", name),))

    def unplaced(self) -> None:
        while self.later:
            self.index, value, place, steps, reason = self.later.pop(0)
            self._search(value, place, steps, reason)

    def visit(self, value: object, place: str, steps: tuple[Step, ...]) -> None:
        here = (self.index, steps)
        if isinstance(value, torch.Tensor):
            self._tensor(value, place, steps)
        elif isinstance(value, _VALUES):
            self.found.scalars[here] = value
        elif isinstance(value, nn.Module) and id(value) in self.registered:
            self.found.aliases[here] = self.registered[id(value)]
        elif id(value) in self.seen:
            self.found.aliases[here] = self.seen[id(value)][1]
        elif len(steps) > MAX_DEPTH:
            self.later.append((self.index, value, place, steps, "it is nested too deeply"))
        else:
            if not _is_anonymous(value):
                self.seen[id(value)] = (value, here)
            self._inside(value, place, steps)

    def _tensor(self, tensor: torch.Tensor, place: str, steps: tuple[Step, ...]) -> None:
        self.found.tensors.append(FoundTensor(self.index, place, steps, tensor))
        if id(tensor) in self.seen:
            return
        self.seen[id(tensor)] = (tensor, (self.index, steps))
        for name, value in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
            below: tuple[Step, ...] = (*steps, ("attr", name))
            if isinstance(value, torch.Tensor):
                self._later(value, place, below, "it is an attribute of another tensor")
            else:
                self.visit(value, manifest.ATTRIBUTE, below)

    def _inside(self, value: object, place: str, steps: tuple[Step, ...]) -> None:
        kind = class_name(type(value))
        match value:
            case dict():
                keys = tuple(key if _is_plain(key) else (repr(key), _shown(item)) for key, item in value.items())
                self.found.containers[self.index, steps] = (kind, keys)
                for key, item in list(value.items()):
                    if _is_plain(key):
                        self.visit(item, place, (*steps, ("key", key)))
                    else:
                        self._later(item, place, (*steps, ("key", repr(key))), "its dictionary key is no plain value")
            case list() | tuple() | deque():
                self.found.containers[self.index, steps] = (kind, tuple(range(len(value))))
                for position, item in enumerate(list(value)):
                    self.visit(item, place, (*steps, ("item", position)))
            case set() | frozenset():
                items = tuple(sorted((item if _is_plain(item) else (_shown(item),) for item in value), key=repr))
                self.found.containers[self.index, steps] = (kind, items)
                for position, item in enumerate(list(value)):
                    self._later(item, place, (*steps, ("item", position)), "it is in a set")
            case _:
                self._object(value, place, steps)

    def _object(self, value: Any, place: str, steps: tuple[Step, ...]) -> None:
        if isinstance(value, (*_FUNCTIONS, *_CODE)):
            self.found.objects[self.index, steps] = (_code_name(value), ())
            for name, item in _held_by_code(value):
                self._later(item, place, (*steps, ("attr", name)), "it is bound inside a function")
            return
        attributes = [] if _is_foreign(type(value)) else list(_attributes(value))
        self.found.objects[self.index, steps] = (class_name(type(value)), tuple(name for name, _ in attributes))
        for name, item in attributes:
            below: tuple[Step, ...] = (*steps, ("attr", name))
            if manifest.is_reserved(name):
                self._later(item, place, below, "its name belongs to Python")
            else:
                self.visit(item, place, below)

    def _later(self, value: object, place: str, steps: tuple[Step, ...], reason: str) -> None:
        if not isinstance(value, _VALUES):
            self.later.append((self.index, value, place, steps, reason))

    def _search(self, value: Any, place: str, steps: tuple[Step, ...], reason: str) -> None:
        """Look for tensors that have no place of their own. A container that has one elsewhere is filled there."""
        if isinstance(value, torch.Tensor):
            self.found.tensors.append(FoundTensor(self.index, place, steps, value, reason))
            return
        if isinstance(value, _VALUES) or id(value) in self.registered or id(value) in self.seen:
            return
        if len(steps) > SEARCH_DEPTH:
            raise ExportRefused(f"{self.found.path(self.index, steps)} is nested too deeply to be looked through")
        self.seen[id(value)] = (value, (self.index, steps))
        for step, item in _parts(value):
            self._search(item, place, (*steps, step), reason)


def class_name(cls: type) -> str:
    """The qualified name of a class, as the manifest writes it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_plain(key: object) -> bool:
    return type(key) is int or type(key) is str


def _is_anonymous(value: object) -> bool:
    """Values of which it makes no difference which object they are: unchanging ones, and what is not looked into."""
    return isinstance(value, (tuple, frozenset, *_FUNCTIONS, *_CODE)) or _is_foreign(type(value))


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, _VALUES) else class_name(type(value))


def _code_name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial of {_code_name(value.func)}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{class_name(type(value))} {getattr(value, '__module__', '')}.{name}"


def _parts(value: Any) -> Iterator[tuple[Step, object]]:
    match value:
        case dict():
            yield from ((("key", key if _is_plain(key) else repr(key)), item) for key, item in list(value.items()))
        case list() | tuple() | deque() | set() | frozenset():
            yield from ((("item", position), item) for position, item in enumerate(list(value)))
        case _ if isinstance(value, _FUNCTIONS):
            yield from ((("attr", name), item) for name, item in _held_by_code(value))
        case _ if not isinstance(value, _CODE) and not _is_foreign(type(value)):
            yield from ((("attr", name), item) for name, item in _attributes(value))


def _held_by_code(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield "args", value.args
        yield "keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
        yield "__defaults__", value.__defaults__
        yield "__kwdefaults__", value.__kwdefaults__


def _is_foreign(cls: type) -> bool:
    return _is_others(cls.__module__)


@functools.cache
def _is_others(module: str) -> bool:
    return any(
        module == prefix or module.startswith(f"{prefix}." if prefix[-1] != "_" else prefix) for prefix in _FOREIGN
    )


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            # A private name is stored under its mangled form.
            stored = f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name
            try:
                yield stored, getattr(value, stored)
            except AttributeError:
                continue
