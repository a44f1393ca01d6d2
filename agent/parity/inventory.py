"""What is reachable from a loaded model, as a record, and the comparison of two of them.

Two inventories are equal when an engine could not tell a disk load from an attach: the same places, the same bytes,
shapes, strides and types, the same object behind several names, the same plain values.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.errors import ProtocolError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One place that holds a tensor.

    ``same`` is the first place that holds the same object; ``memory`` the first one whose memory overlaps (itself, if
    none does), and ``delta`` the bytes from there. ``sha256`` is that of the values in the order of their indices.
    """

    place: str
    cls: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    same: str
    memory: str
    delta: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """One rank's model of one role. ``tensors`` and ``values`` go by path; ``methods`` is how many layers use each.

    ``bytes`` are those of all tensors that were found. ``unreached`` are those of tensors of the model's device that
    live in the process and were found nowhere below the model: workspaces of other parts, or state that neither this
    list nor an attached engine has.
    """

    role: str
    rank: int
    sglang_version: str
    capability: str
    methods: dict[str, int]
    tensors: dict[str, TensorRow]
    values: dict[str, str]
    bytes: int
    unreached: int
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"rank-{self.rank}.{self.role}.json"


@dataclass(frozen=True, slots=True)
class Deviation:
    """Something that differs: where, in what, and both values."""

    path: str
    what: str
    disk: str
    attached: str


def write(directory: Path, inventory: Inventory) -> None:
    """Write it into ``directory`` by rename."""
    temporary = directory / f".{inventory.name}"
    with open(temporary, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        json.dump(records.to_plain(inventory), file)
    temporary.rename(directory / inventory.name)


def read(path: Path) -> Inventory:
    """Read one. Raises ProtocolError for anything else."""
    try:
        return records.from_plain(Inventory, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ProtocolError(f"{path}: no inventory ({error})") from None


def compare(disk: Inventory, attached: Inventory) -> Iterator[Deviation]:
    """Everything in which ``attached`` is not what ``disk`` is."""
    for name in ("role", "rank", "sglang_version", "capability"):
        if getattr(disk, name) != getattr(attached, name):
            yield Deviation("", name, str(getattr(disk, name)), str(getattr(attached, name)))
    for method in sorted({*disk.methods, *attached.methods}):
        one, other = disk.methods.get(method, 0), attached.methods.get(method, 0)
        if one != other:
            yield Deviation("", method, f"{one} layers", f"{other} layers")
    yield from _differing_rows(disk, attached)
    for path in _both(disk.values, attached.values):
        values = disk.values.get(path, "absent"), attached.values.get(path, "absent")
        if values[0] != values[1]:
            yield Deviation(path, "value", *values)


def _differing_rows(disk: Inventory, attached: Inventory) -> Iterator[Deviation]:
    for path in _both(disk.tensors, attached.tensors):
        one, other = disk.tensors.get(path), attached.tensors.get(path)
        if one is None or other is None:
            yield Deviation(path, "tensor", _in_short(one), _in_short(other))
            continue
        for field in dataclasses.fields(TensorRow):
            values = getattr(one, field.name), getattr(other, field.name)
            if values[0] != values[1]:
                yield Deviation(path, field.name, str(values[0]), str(values[1]))


def _both(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [*one, *(path for path in other if path not in one)]


def _in_short(row: TensorRow | None) -> str:
    return "absent" if row is None else f"{row.dtype} {row.shape}"
