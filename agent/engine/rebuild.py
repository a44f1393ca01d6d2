"""Give a model that was built on ``meta`` the tensors, names and values of a manifest.

No data transform runs here: the bytes are what loading and post-processing left. Shared storages become views of the
read-only mapping, private ones are copied. Identity is kept: one row is one object, whatever number of places name it.
"""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weightcache import manifest
from weightcache.engine.places import check_name, clear, held_in, value_at
from weightcache.engine.tree import Table, Tree, look_through, name_of, on_meta, with_tensors
from weightcache.errors import AttachFailed
from weightcache.loader.walk import class_name
from weightcache.manifest import Manifest, Step
from weightcache.memory.views import dtype_of, extent, view


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What an attached set leaves in the process, for sets that refer to it (a draft's shared parts)."""

    modules: tuple[nn.Module, ...]
    paths: Mapping[str, nn.Module]
    tensors: tuple[torch.Tensor | None, ...]


def copy_private(body: Manifest, base: torch.Tensor) -> dict[int, torch.Tensor]:
    """A copy of each private storage of ``body``, by its row; ``base`` is a uint8 tensor over the mapped range.

    On a GPU the copies run while the host goes on.
    """
    rows = ((index, storage) for index, storage in enumerate(body.storages) if not storage.shared)
    return {index: base[row.offset : row.offset + row.bytes].clone() for index, row in rows}


def rebuild(
    model: nn.Module,
    body: Manifest,
    base: torch.Tensor,
    others: Mapping[str, Rebuilt] | None = None,
    private: Mapping[int, torch.Tensor] | None = None,
    tree: Tree | None = None,
) -> Rebuilt:
    """Bind ``body`` into ``model``; ``base`` is a uint8 tensor over the mapped range.

    ``others`` holds already attached sets by role, ``private`` what copy_private made of this one, ``tree`` what
    look_through made of the model as it is (default of both: made here).
    Raises AttachFailed when the trees differ; the model is then unfit.
    """
    try:
        private = copy_private(body, base) if private is None else private
        tree = look_through(model) if tree is None else tree
        return _Builder(model, body, base, others or {}, private, tree).run()
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        RuntimeError,
        OverflowError,
        ImportError,
    ) as error:
        raise AttachFailed(f"the model does not fit the manifest: {type(error).__name__}: {error}") from error


class _Form(NamedTuple):
    """What thousands of tensors have in common: all but where they lie and how large they are.

    ``as_strided`` makes a view of the mapped range (None: the bytes are this engine's own), ``cls`` is the class of a
    parameter (None: no parameter).
    """

    dtype: torch.dtype
    itemsize: int
    as_strided: Callable[..., torch.Tensor] | None
    cls: type[torch.Tensor] | None
    requires_grad: bool
    attributes: tuple[str, ...]


_INLINE = manifest.Storage(0, 0, shared=False)


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        body: Manifest,
        base: torch.Tensor,
        others: Mapping[str, Rebuilt],
        private: Mapping[int, torch.Tensor],
        tree: Tree,
    ) -> None:
        self.model = model
        self.body = body
        self.base = base
        self.others = others
        self.tree = tree
        self.modules: list[nn.Module] = []
        self.paths: dict[str, nn.Module] = {"": model}
        # What each module holds, by its row: a module's dict is looked into once, since thousands of them fit no cache.
        self.own: list[Table] = []
        self.parameters: list[Table] = []
        self.buffers: list[Table] = []
        # The places that could hold something on meta in the end; None: all that the modules have are looked at.
        self.suspects: list[tuple[Table, str]] | None = None
        self.tensors: list[torch.Tensor | None] = [None] * len(body.tensors)
        self.private = private
        # By dtype, as_strided of the whole range as elements of that type.
        self.typed: dict[torch.dtype, Callable[..., torch.Tensor]] = {}
        # What the columns that repeat say, by what they say and the class of the tensor that is replaced.
        self.forms: dict[tuple[object, ...], _Form] = {}

    def run(self) -> Rebuilt:
        self._resolve_modules()
        for switch in self.body.switches:
            getattr(importlib.import_module(switch.place), switch.name)[switch.key] = switch.value
        rows: list[manifest.Record | manifest.Container] = [*self.body.records, *self.body.containers]
        rows.sort(key=lambda row: len(row.steps))  # what holds others comes first
        for made in rows:
            if isinstance(made, manifest.Container):
                self._contain(made)
            elif made.cls:
                self._assign(self.modules[made.module], made.steps, _new_record(made.cls))
        for record in self.body.records:
            if not record.cls:
                held = value_at(self.modules[record.of], record.at)
                self._assign(self.modules[record.module], record.steps, held)
        self._fill_slots()
        for row in self.body.removed:
            self._remove(row)
        for scalar in self.body.scalars:
            module = self.modules[scalar.module]
            self._assign(module, scalar.steps, _scalar(scalar.value, module, scalar.steps))
        for names in self.body.names:
            self._order(names)
        self._nothing_left_on_meta()
        return Rebuilt(tuple(self.modules), self.paths, tuple(self.tensors))

    def _resolve_modules(self) -> None:
        tree = self.tree
        if tree.is_of(self.body.modules):  # then every path leads where it should, and no module is missing or left
            self.modules, self.paths = tree.modules, tree.by_path
            self.own, self.parameters, self.buffers = tree.own, tree.parameters, tree.buffers
            self.suspects = list(tree.on_meta)
            return
        known = self.paths
        elsewhere: list[tuple[Sequence[str], nn.Module]] = []
        children: list[dict[str, nn.Module | None]] = []
        for paths, cls, external in self.body.modules:
            path = paths[0]
            module = self._external_module(external) if external else self._submodule(path)
            if name_of(type(module)) != cls:
                raise AttachFailed(
                    f"the module {path or 'at the root'} is a {class_name(type(module))} here and a {cls} in the set"
                )
            known[path] = module
            own = vars(module)
            self.modules.append(module)
            self.own.append(own)
            self.parameters.append(own["_parameters"])
            self.buffers.append(own["_buffers"])
            # A module of this tree was found by its first path; the others may still lead elsewhere.
            if external:
                elsewhere.append((paths, module))
            else:
                if len(paths) > 1:
                    elsewhere.append((paths[1:], module))
                if below := own["_modules"]:
                    children.append(below)
        for others, module in elsewhere:
            for path in filter(None, others):
                self._place_module(path, module)
        known.update({path: module for others, module in elsewhere for path in others})
        self._no_other_modules(children)

    def _no_other_modules(self, tables: Iterable[dict[str, nn.Module | None]]) -> None:
        """Every child in ``tables``, the children of this set's own modules, has a row."""
        rows = {id(None), *map(id, self.modules)}
        if rows.issuperset(map(id, itertools.chain.from_iterable(table.values() for table in tables))):
            return
        for row, own in zip(self.body.modules, self.own, strict=True):
            for name, child in {} if row.external else own["_modules"].items():
                if id(child) not in rows:
                    raise AttachFailed(f"the set knows no module {f'{row.paths[0]}.{name}'.lstrip('.')}")

    def _submodule(self, path: str) -> nn.Module:
        if not path:
            return self.model
        parent, _, name = path.rpartition(".")
        holder = self.paths.get(parent)
        child = None if holder is None else holder._modules.get(name)
        if child is None:
            raise AttachFailed(f"this model has no module {path}")
        return child

    def _place_module(self, path: str, module: nn.Module) -> None:
        """Make ``path`` lead to ``module``: shared modules stay shared even where construction made two."""
        parent, _, name = path.rpartition(".")
        holder = self.paths.get(parent)
        if holder is None:
            raise AttachFailed(f"this model has no module {parent}")
        if holder._modules.get(name) is not module:
            holder._modules[name] = module

    def _external_module(self, reference: str) -> nn.Module:
        role, _, path = reference.partition(":")
        if role not in self.others or path not in self.others[role].paths:
            raise AttachFailed(f"this set needs the module {path!r} of the set {role!r}, which is not attached")
        return self.others[role].paths[path]

    def _external_tensor(self, reference: str) -> torch.Tensor:
        role, _, index = reference.partition(":")
        tensors = self.others[role].tensors if role in self.others else ()
        tensor = tensors[int(index)] if 0 <= int(index) < len(tensors) else None
        if tensor is None:
            raise AttachFailed(f"this set needs tensor {index} of the set {role!r}, which is not attached")
        return tensor

    def _fill_slots(self) -> None:
        """Nearly all of thousands are a parameter in the place of one, which takes two look-ups."""
        parameters, make, parameter = self.parameters, self._tensor, manifest.PARAMETER
        for slot in self.body.slots:
            index, place, steps, row, external = slot
            if place == parameter and len(steps) == 1 and not external:
                table, name = parameters[index], steps[0][1]
                if name in table:
                    table[name] = make(row, table[name])
                    continue
            self._fill(slot)

    def _fill(self, slot: manifest.Slot) -> None:
        module = self.modules[slot.module]
        name = str(slot.steps[0][1])
        check_name(name)
        old = held_in(module, slot)
        tensor = self._external_tensor(slot.external) if slot.external else self._tensor(slot.tensor, old)
        if len(slot.steps) > 1 or slot.place == manifest.ATTRIBUTE:
            self._assign(module, slot.steps, tensor)
        elif slot.place == manifest.PARAMETER:
            clear(module, name, keep=module._parameters)
            module._parameters[name] = tensor
        else:
            clear(module, name, keep=module._buffers)
            module._buffers[name] = tensor
            if slot.place == manifest.TRANSIENT_BUFFER:
                module._non_persistent_buffers_set.add(name)
            else:
                module._non_persistent_buffers_set.discard(name)

    def _tensor(self, index: int, old: object) -> torch.Tensor:
        if (made := self.tensors[index]) is not None:
            return made
        row = self.body.tensors[index]
        storage, offset, shape, stride = row[:4]
        start, size, shared = self.body.storages[storage] if storage >= 0 else _INLINE
        key = row[4:], type(old), shared
        dtype, itemsize, as_strided, cls, requires_grad, attributes = self.forms.get(key) or self._form(row, old, key)
        if as_strided is None:
            tensor = self._own_data(row, dtype)
        elif (offset + _extent(shape, stride)) * itemsize > size:
            raise ValueError(f"a tensor that leaves its storage: {row}")
        else:
            # One call a tensor: hundreds of them are most of what an attach does on the host.
            tensor = as_strided(shape, stride, start // itemsize + offset)
        if cls is not None:
            tensor = _make_subclass(cls, tensor, requires_grad)
        elif requires_grad:
            tensor.requires_grad_()
        if attributes:
            held = getattr(old, "__dict__", {})
            given = tensor.__dict__
            try:
                for name in attributes:
                    given[name] = held[name]
            except KeyError as error:
                raise AttachFailed(
                    f"a tensor of the set carries the attribute {error}, which this model does not make"
                ) from None
        self.tensors[index] = tensor
        return tensor

    def _own_data(self, row: manifest.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of a tensor whose bytes belong to this engine."""
        if row.storage >= 0:
            return view(self.private[row.storage], row.offset * dtype.itemsize, row.shape, row.stride, dtype)
        raw = bytearray(self.body.inline[-row.storage - 1])
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return view(flat.clone(), 0, row.shape, row.stride, dtype)

    def _form(self, row: manifest.Tensor, old: object, key: tuple[object, ...]) -> _Form:
        dtype = dtype_of(row.dtype)
        as_strided = None
        if row.storage >= 0 and self.body.storages[row.storage].shared:
            as_strided = self.typed.get(dtype) or self.typed.setdefault(dtype, self.base.view(dtype).as_strided)
        cls = _parameter_class(row.cls, old) if row.kind == "parameter" else None
        form = self.forms[key] = _Form(dtype, dtype.itemsize, as_strided, cls, row.requires_grad, row.attributes)
        return form

    def _assign(self, module: nn.Module, steps: Sequence[Step], value: object) -> None:
        holder = value_at(module, steps[:-1])
        if isinstance(holder, tuple):
            # A tuple cannot be changed in place: make the new one and put it where the old one was.
            items = list(holder)
            items[int(steps[-1][1])] = value
            new = type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)
            self._assign(module, steps[:-1], new)
            return
        kind, step = steps[-1]
        if kind == "attr":
            if isinstance(holder, nn.Module):
                check_name(str(step), allowed="training")
                own = vars(holder)
                clear(holder, str(step), keep=own)
                own[str(step)] = value
                if self.suspects is not None and isinstance(value, torch.Tensor):
                    self.suspects.append((own, str(step)))
            else:
                object.__setattr__(holder, str(step), value)
        elif isinstance(holder, list | dict | deque):
            holder[step] = value  # type: ignore[index]
        else:
            raise AttachFailed(f"cannot place a value inside a {class_name(type(holder))}")

    def _contain(self, row: manifest.Container) -> None:
        """Make a container, or give the one that is there other keys; what it keeps stays the same object."""
        module = self.modules[row.module]
        old = value_at(module, row.steps)
        held = old if class_name(type(old)) == row.kind else None
        kept: dict[Any, Any] = {}
        if isinstance(held, dict):
            kept = dict(held)
        elif isinstance(old, list | tuple | deque):
            kept = dict(enumerate(old))
        items = [(key, kept.get(key)) for key in row.keys]
        if isinstance(held, dict):
            held.clear()
            held.update(items)
        elif isinstance(held, list | deque):
            held.clear()
            held.extend(value for _, value in items)
        elif isinstance(held, set):
            held.clear()
            held.update(row.keys)
        elif row.kind in _MAKERS:
            self._assign(module, row.steps, _MAKERS[row.kind](items))
        else:
            raise AttachFailed(f"cannot make a {row.kind}")

    def _order(self, row: manifest.Names) -> None:
        module = self.modules[row.module]
        table: Any = module._parameters if row.place == manifest.PARAMETER else module._buffers
        named = {name: table.get(name) for name in row.names}
        for name, value in named.items():
            check_name(name)
            if value is None:
                clear(module, name, keep=table)
        table.clear()
        table.update(named)

    def _remove(self, row: manifest.Removed) -> None:
        module = self.modules[row.module]
        table: Any = {manifest.PARAMETER: module._parameters, manifest.BUFFER: module._buffers}.get(
            row.place, vars(module)
        )
        check_name(row.name)
        if row.none:
            table[row.name] = None
            return
        table.pop(row.name, None)
        if row.place == manifest.BUFFER:
            module._non_persistent_buffers_set.discard(row.name)

    def _nothing_left_on_meta(self) -> None:
        """What construction made is in the manifest, slot by slot; this catches a construction that made more here."""
        if self.suspects is None:
            self.suspects = on_meta([*self.parameters, *self.buffers, *with_tensors(self.own)])
        for table, name in self.suspects:
            value = table.get(name)
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise AttachFailed(f"the set brings no value for {self._path_of(table)}{name}")

    def _path_of(self, table: Table) -> str:
        for row, *held in zip(self.body.modules, self.parameters, self.buffers, self.own, strict=True):
            if any(table is one for one in held):
                return f"{row.paths[0]}." if row.paths[0] else ""
        return ""


_make_subclass: Callable[[type[torch.Tensor], torch.Tensor, bool], torch.Tensor] = torch.Tensor._make_subclass


_extent: Callable[[tuple[int, ...], tuple[int, ...]], int] = functools.cache(extent)
"""Computed once for each shape: the layers of a model have the same few."""


_MAKERS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "builtins.list": lambda items: [value for _, value in items],
    "builtins.tuple": lambda items: tuple(value for _, value in items),
    # Filled with numbers, since it takes nothing else.
    "torch.Size": lambda items: torch.Size([0] * len(items)),
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.deque": lambda items: deque(value for _, value in items),
    "builtins.set": lambda items: {key for key, _ in items},
    "builtins.frozenset": lambda items: frozenset(key for key, _ in items),
}


def _scalar(value: manifest.Scalar, module: nn.Module, steps: Sequence[Step]) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, name = value
    if kind == "dtype":
        return dtype_of(name)
    old = value_at(module, steps)
    cls, _, member = name.partition(":")
    if not isinstance(old, enum.Enum) or class_name(type(old)) != cls:
        raise AttachFailed(f"this model has no {cls} where the set has one")
    return type(old)[member]


def _parameter_class(name: str, old: object) -> type[torch.Tensor]:
    """The class of the parameter that is replaced where it has that name; else a class that is loaded already.

    Nothing is imported by name: a manifest is data.
    """
    if isinstance(old, torch.Tensor) and name_of(type(old)) == name:
        return type(old)
    return _loaded_parameter_class(name)


def _new_record(name: str) -> object:
    """An object without attributes; no code of its class runs."""
    module, _, cls = name.rpartition(".")
    try:
        made: object = object.__new__(getattr(importlib.import_module(module), cls))
    except (ImportError, AttributeError, TypeError) as error:
        raise AttachFailed(f"no {name} can be made here: {error}") from None
    return made


@functools.cache
def _loaded_parameter_class(name: str) -> type[torch.Tensor]:
    pending: list[type] = [nn.Parameter]
    while pending:
        cls = pending.pop()
        if class_name(cls) == name:
            return cls
        pending += cls.__subclasses__()
    raise AttachFailed(f"this model has no parameter class {name}")
