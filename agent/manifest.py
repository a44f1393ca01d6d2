"""What lies where in a set's arenas, and how the module tree is rebuilt from it. Pure data: no pickle, no imports.

A weight set is one linear range of bytes: its arenas back to back. A *storage* is a piece of that range, a *tensor*
is a view of a storage (or of an inline value), a *module* is one object of the tree with all paths that lead to it,
and a *slot* is a place (module, kind, steps) that holds a tensor. One object that several slots name is one row: that
is how tied weights and shared modules stay one object. A table travels as one JSON value a column (columns.py).

    storage   offset, bytes, shared                       shared: mapped read-only; otherwise copied per engine
    tensor    storage, offset, shape, stride, dtype, kind, cls, requires_grad, attributes
    module    paths, cls, external                        external: the same object in another set ("target:PATH")
    slot      module, place, steps, tensor, external
    removed   module, place, name, none                   exists after construction, gone (or None) after loading
    container module, steps, kind, keys                   list, tuple, dict or set that loading made or resized
    record    module, steps, cls, of, at                  helper object that loading made, or one that is elsewhere too
    switch    place, name, key, value                     value in a dictionary of SWITCHES, outside the model
    scalar    module, steps, value                        changed by loading
    names     module, place, names                        the order of names, where loading changed it
"""

from __future__ import annotations

import base64
import builtins
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightcache.columns import Column, Folded, Lists, Numbers, Values, lists_of, of, one, only
from weightcache.errors import ProtocolError

SCHEMA = 4
MAX_BYTES = 256 << 20
"""Largest manifest that is read, in bytes."""

ALIGNMENT = 512
"""Each storage starts at a multiple of this many bytes, as torch's CUDA allocator does."""

PARAMETER, BUFFER, TRANSIENT_BUFFER, ATTRIBUTE = "parameter", "buffer", "transient-buffer", "attribute"
PLACES = (PARAMETER, BUFFER, TRANSIENT_BUFFER, ATTRIBUTE)

RECORD_PACKAGES = ("triton_kernels",)
"""Packages whose objects are nothing but their attributes: an engine makes them, and imports their classes by name."""

WEIGHT_RECORDS = ("triton_kernels.tensor.Storage",)
"""Classes of these packages that hold a weight as ``data``, which kernels read only."""

SWITCHES = (
    ("triton_kernels.matmul_ogs_details.opt_flags", "_opt_flags_constraints"),
    ("triton_kernels.matmul_details.opt_flags", "_opt_flags_constraints"),
)
"""Dictionaries of plain values outside every model, as (module, name), that loading writes into."""

Step = tuple[str, str | int]
"""One step from a module to a value: ("attr", name), ("item", index) or ("key", key)."""

Scalar = bool | int | float | str | None | tuple[str, str]
"""A plain value, ("dtype", name) or ("enum", "CLASS:NAME")."""


class Storage(NamedTuple):
    """``bytes`` at ``offset`` of the set's range; ``shared`` ones are mapped read-only, others copied per engine."""

    offset: int
    bytes: int
    shared: bool


class Tensor(NamedTuple):
    """A view. ``storage`` >= 0 is a row of storages, < 0 is inline value -storage - 1. ``offset`` is in elements.

    ``kind`` is ``parameter`` or ``tensor``; ``cls`` is the qualified class of a parameter; ``attributes`` are the
    names set on the tensor object itself, which an attached tensor takes over from the one it replaces.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    kind: str
    cls: str
    requires_grad: bool
    attributes: tuple[str, ...]


class Module(NamedTuple):
    """One module object: every path that leads to it, the first one canonical, and its qualified class."""

    paths: tuple[str, ...]
    cls: str
    external: str = ""


class Slot(NamedTuple):
    """A place that holds a tensor: ``place`` is one of PLACES, ``steps`` lead from the module to the value.

    ``tensor`` -1 with ``external`` "ROLE:N" names tensor N of another set instead.
    """

    module: int
    place: str
    steps: tuple[Step, ...]
    tensor: int
    external: str = ""


class Removed(NamedTuple):
    """A name that construction leaves behind and loading takes away (``none``: sets to None)."""

    module: int
    place: str
    name: str
    none: bool


class Container(NamedTuple):
    """A container that loading made or resized: its qualified class and its keys, positions or (of a set) items."""

    module: int
    steps: tuple[Step, ...]
    kind: str
    keys: tuple[str | int, ...]


class Record(NamedTuple):
    """A helper object that loading made: its qualified class, of RECORD_PACKAGES. Other rows give its attributes.

    With an empty class it is the object at the steps ``at`` of the module ``of``, a record too.
    """

    module: int
    steps: tuple[Step, ...]
    cls: str
    of: int = -1
    at: tuple[Step, ...] = ()


class Switch(NamedTuple):
    """A value in the dictionary ``name`` of the Python module ``place``, one of SWITCHES."""

    place: str
    name: str
    key: str
    value: Scalar


class ChangedScalar(NamedTuple):
    """A plain value on a module or one of its helper objects that loading changed."""

    module: int
    steps: tuple[Step, ...]
    value: Scalar


class Names(NamedTuple):
    """All names of one table of a module in their order, None values included, where construction gives another."""

    module: int
    place: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole set. ``bytes`` is the used length of its range."""

    bytes: int
    storages: tuple[Storage, ...]
    inline: tuple[builtins.bytes, ...]
    tensors: tuple[Tensor, ...]
    modules: tuple[Module, ...]
    slots: tuple[Slot, ...]
    removed: tuple[Removed, ...]
    scalars: tuple[ChangedScalar, ...]
    containers: tuple[Container, ...] = ()
    names: tuple[Names, ...] = ()
    records: tuple[Record, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def private_bytes(self) -> int:
        """Bytes that every attached engine copies for itself."""
        return sum(s.bytes for s in self.storages if not s.shared)


def is_record(cls: str) -> bool:
    """Whether an engine may make objects of the class ``cls``."""
    return cls.partition(".")[0] in RECORD_PACKAGES


def is_reserved(name: str) -> bool:
    """Whether ``name`` belongs to Python itself (``__class__``, ``__dict__``): no step may lead through it."""
    return name.startswith("__") and name.endswith("__")


def encode(manifest: Manifest) -> bytes:
    """JSON, one value a column: an attach decodes thousands of rows, and a column is checked in one pass."""
    body: dict[str, Any] = {"schema": SCHEMA, "bytes": manifest.bytes}
    body["inline"] = [base64.b64encode(value).decode() for value in manifest.inline]
    for name, table in _TABLES.items():
        rows = getattr(manifest, name)
        plain = list(zip(*rows, strict=True)) or [()] * len(table.columns)
        body[name] = [column.fold(values) for column, values in zip(table.columns, plain, strict=True)]
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes) -> Manifest:
    """Parse and check a manifest: types, ranges and every reference. Raises ProtocolError."""
    try:
        return _parsed(json.loads(data))
    except ProtocolError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ProtocolError(f"a malformed manifest: {type(error).__name__}: {error}") from None


def _parsed(body: Any) -> Manifest:
    if body.get("schema") != SCHEMA:
        raise ProtocolError(f"a manifest of schema {body.get('schema')!r}; this version reads {SCHEMA}")
    size, rows = one(int, body["bytes"]), {}
    inline = tuple(base64.b64decode(value, validate=True) for value in one(list, body["inline"]))
    for name, table in _TABLES.items():
        columns = table.unfold(body[name])
        rows[name] = table.rows(columns)
        if name in _LARGE:
            _LARGE[name](columns, rows, size, len(inline))
    manifest = Manifest(bytes=size, inline=inline, **rows)
    _check(manifest)
    return manifest


_STEP_TYPES: dict[str, tuple[type, ...]] = {"attr": (str,), "item": (int,), "key": (str, int)}


def _steps(column: list[Any]) -> Iterable[Any]:
    only(column, list)
    return [tuple([_step(*step) for step in steps]) for steps in column]


def _step(kind: str, step: Any) -> Step:
    if type(step) not in _STEP_TYPES.get(kind, ()) or (kind == "attr" and is_reserved(step)):
        raise ValueError(f"an unknown step {kind!r} {step!r}")
    return kind, step


def _scalars(column: list[Any]) -> Iterable[Any]:
    return map(_scalar, column)


def _scalar(value: Any) -> Scalar:
    if isinstance(value, list):
        kind, name = value
        if kind not in ("dtype", "enum"):
            raise ValueError(f"an unknown kind of value {kind!r}")
        return (kind, one(str, name))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a value that is no scalar: {value!r}")


class _Table(NamedTuple):
    """How the rows of one table are made from its columns."""

    row: Any
    columns: tuple[Column, ...]

    def unfold(self, columns: Any) -> list[Sequence[Any]]:
        one(list, columns)
        return [known.unfold(column) for known, column in zip(self.columns, columns, strict=True)]

    def rows(self, columns: list[Sequence[Any]]) -> tuple[Any, ...]:
        # What _make does, without a Python call a row; all lengths are checked by zip.
        return tuple(map(functools.partial(tuple.__new__, self.row), zip(*columns, strict=True)))


_INT, _SCALAR = Numbers(), Values(_scalars)
_BOOL, _TEXT, _INTS, _TEXTS, _STEPS = map(Folded, (of(bool), of(str), lists_of(int), lists_of(str), _steps))
_PATHS, _KEYS = Lists(of(str)), Lists(of(str, int))

_TABLES: dict[str, _Table] = {
    "storages": _Table(Storage, (_INT, _INT, _BOOL)),
    "tensors": _Table(Tensor, (_INT, _INT, _INTS, _INTS, _TEXT, _TEXT, _TEXT, _BOOL, _TEXTS)),
    "modules": _Table(Module, (_PATHS, _TEXT, _TEXT)),
    "slots": _Table(Slot, (_INT, _TEXT, _STEPS, _INT, _TEXT)),
    "removed": _Table(Removed, (_INT, _TEXT, _TEXT, _BOOL)),
    "scalars": _Table(ChangedScalar, (_INT, _STEPS, _SCALAR)),
    "containers": _Table(Container, (_INT, _STEPS, _TEXT, _KEYS)),
    "names": _Table(Names, (_INT, _TEXT, _TEXTS)),
    "records": _Table(Record, (_INT, _STEPS, _TEXT, _INT, _STEPS)),
    "switches": _Table(Switch, (_TEXT, _TEXT, _TEXT, _SCALAR)),
}


# Every reference resolves and every storage lies inside the range, so that a reader never leaves its mapping. Tables of
# thousands of rows are checked by their columns, each as soon as it and those that it refers to are there.

Columns = Sequence[Sequence[Any]]
Rows = Mapping[str, tuple[Any, ...]]


def _check_storages(columns: Columns, _rows: Rows, size: int, _inline: int) -> None:
    if size < 0:
        raise ValueError(f"a set of {size} bytes")
    for offset, length in zip(*columns[:2], strict=True):
        if offset % ALIGNMENT or offset < 0 or length < 0 or offset + length > size:
            raise ValueError(f"a storage outside the set: {length} bytes at {offset}")


def _check_tensors(columns: Columns, rows: Rows, _size: int, inline: int) -> None:
    storages, offsets, shapes, strides, _, kinds, *_ = columns
    for row in _outside(storages, -inline, len(rows["storages"])):
        raise ValueError(f"a tensor without storage: {rows['tensors'][row]}")
    for row in _outside(offsets, 0):
        raise ValueError(f"a tensor that starts before its storage: {rows['tensors'][row]}")
    for shape, stride in set(zip(shapes, strides, strict=True)):
        if len(shape) != len(stride) or min((*shape, *stride, 0)) < 0:
            raise ValueError(f"a tensor with an impossible shape: {shape}, strides {stride}")
    for kind in set(kinds).difference(("parameter", "tensor")):
        raise ValueError(f"an unknown kind of tensor {kind!r}")


def _check_modules(columns: Columns, _rows: Rows, _size: int, _inline: int) -> None:
    if not all(columns[0]):
        raise ValueError("a module without a path")


def _check_slots(columns: Columns, rows: Rows, _size: int, _inline: int) -> None:
    modules, places, steps, tensors, external = columns
    if _outside(modules, 0, len(rows["modules"])):
        raise ValueError("a row without module")
    if not all(steps) or not set(places).issubset(PLACES):
        place = next(slot.place for slot in rows["slots"] if slot.place not in PLACES or not slot.steps)
        raise ValueError(f"an unknown place {place!r}")
    for row in _outside(tensors, 0, len(rows["tensors"])):
        if tensors[row] != -1 or not external[row]:
            raise ValueError(f"a slot without tensor: {rows['slots'][row]}")


_LARGE: dict[str, Callable[[Columns, Rows, int, int], None]] = {
    "storages": _check_storages, "tensors": _check_tensors, "modules": _check_modules, "slots": _check_slots,
}  # fmt: skip


def _outside(numbers: Sequence[int], low: int, high: int = 1 << 64) -> list[int]:
    """The rows whose numbers are not in [low, high)."""
    if not numbers or (low <= min(numbers) and max(numbers) < high):
        return []
    return [row for row, number in enumerate(numbers) if not low <= number < high]


def _check(manifest: Manifest) -> None:
    """The same for the tables of few rows."""
    placed = (manifest.removed, manifest.scalars, manifest.containers, manifest.names, manifest.records)
    if any(not 0 <= row.module < len(manifest.modules) for rows in placed for row in rows):
        raise ValueError("a row without module")
    for removed in manifest.removed:
        if removed.place not in (PARAMETER, BUFFER, ATTRIBUTE) or is_reserved(removed.name):
            raise ValueError(f"an unknown name: {removed}")
    for names in manifest.names:
        if names.place not in (PARAMETER, BUFFER) or any(map(is_reserved, names.names)):
            raise ValueError(f"unknown names: {names}")
    if not all(row.steps for rows in (manifest.scalars, manifest.containers, manifest.records) for row in rows):
        raise ValueError("a value without steps")
    for record in manifest.records:
        if not (is_record(record.cls) if record.cls else 0 <= record.of < len(manifest.modules) and record.at):
            raise ValueError(f"an object that cannot be made: {record}")
    for switch in manifest.switches:
        if (switch.place, switch.name) not in SWITCHES:
            raise ValueError(f"an unknown switch: {switch}")
