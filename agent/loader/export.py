"""Turn a loaded model into a manifest and a packing plan.

Two walks make the difference that loading made: one right after construction (what an engine's own construction will
give it) and one after loading and post-processing. Tensors are taken from the second; names that are gone and plain
values that changed are carried too. Anything that cannot be carried faithfully is an error that names its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weightcache import manifest
from weightcache.errors import ExportRefused, UnplacedTensor
from weightcache.loader.changes import Changes, dtype_name
from weightcache.loader.walk import FoundTensor, Walk, class_name, switches, walk
from weightcache.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Piece:
    """One range of an existing storage that will be copied to ``offset`` of the set.

    ``source`` is a uint8 tensor over the range; ``views`` are the tensor objects that look into it, each with its byte
    offset inside the range.
    """

    offset: int
    source: torch.Tensor
    shared: bool
    views: tuple[tuple[torch.Tensor, int], ...]


@dataclass(frozen=True, slots=True)
class Export:
    """A manifest and the pieces to copy, in the order of their offsets. Packing takes the pieces off the list."""

    manifest: Manifest
    pieces: list[Piece]
    modules: Mapping[int, str]
    tensors: Mapping[int, int]
    objects: tuple[object, ...]

    def known(self, role: str) -> Known:
        """This set's objects, for the export of a set that shares some of them."""
        return Known(role, self.modules, self.tensors, self.objects)


@dataclass(frozen=True, slots=True)
class Known:
    """Objects of another set of the same process, by id: module → canonical path, tensor → row in that set.

    ``objects`` are the same modules and tensors: as long as they live, no other object can have one of the ids.
    """

    role: str
    modules: Mapping[int, str]
    tensors: Mapping[int, int]
    objects: tuple[object, ...]


def export(model: nn.Module, built: Walk, device: torch.device, known: Known | None = None) -> Export:
    """Export ``model`` as loading left it; ``built`` is the walk of the same object right after construction.

    Raises UnplacedTensor or ExportRefused, with the path of what cannot be carried.
    """
    loaded = walk(model)
    if known is not None:
        _leave_out(loaded, {i for i, entry in enumerate(loaded.modules) if id(entry.module) in known.modules})
    _check_places(loaded, device)
    changes = Changes(built, loaded)
    changes.check()
    storages = _Storages(loaded, device, known)
    rows, inline = storages.tensor_rows(changes.carried_attributes())
    body = Manifest(
        bytes=storages.size,
        storages=tuple(storages.rows),
        inline=inline,
        tensors=rows,
        modules=tuple(
            manifest.Module(entry.paths, class_name(type(entry.module)), _external_module(entry.module, known))
            for entry in loaded.modules
        ),
        slots=tuple(storages.slot(entry) for entry in loaded.tensors),
        removed=tuple(changes.removed()),
        scalars=tuple(changes.scalars()),
        containers=tuple(changes.containers()),
        names=tuple(changes.names()),
        records=tuple(changes.records()),
        switches=tuple(switches()),
    )
    paths = {id(entry.module): entry.paths[0] for entry in loaded.modules}
    objects = (*(entry.module for entry in loaded.modules), *storages.tensors.values())
    return Export(body, storages.pieces(), paths, dict(storages.row_of), objects)


def _leave_out(loaded: Walk, modules: set[int]) -> None:
    """Forget what modules of another set hold: that set carries it."""
    loaded.tensors[:] = [entry for entry in loaded.tensors if entry.module not in modules]
    for table in (loaded.scalars, loaded.containers, loaded.objects, loaded.aliases, loaded.names):
        for key in [key for key in table if key[0] in modules]:
            table.pop(key)  # type: ignore[arg-type]


def _external_module(module: nn.Module, known: Known | None) -> str:
    path = known.modules.get(id(module)) if known else None
    return "" if path is None or known is None else f"{known.role}:{path}"


def _check_places(loaded: Walk, device: torch.device) -> None:
    for entry in loaded.tensors:
        path = loaded.path(entry.module, entry.steps)
        if entry.tensor.device.type not in (device.type, "cpu"):
            raise UnplacedTensor(f"the tensor {path} is on {entry.tensor.device}, which this set does not cover")
        if entry.tensor.device.type == device.type and device.index not in (None, entry.tensor.device.index):
            raise UnplacedTensor(f"the tensor {path} is on {entry.tensor.device} and this set's device is {device}")
        if entry.tensor.layout is not torch.strided or entry.tensor.is_quantized:
            raise UnplacedTensor(f"the tensor {path} is not strided ({entry.tensor.layout})")
        if entry.tensor.is_conj() or entry.tensor.is_neg():
            raise UnplacedTensor(f"the tensor {path} is a conjugate or negative view, whose bytes are another value")
        if not isinstance(entry.tensor, nn.Parameter) and type(entry.tensor) is not torch.Tensor:
            raise UnplacedTensor(f"the tensor {path} is a {class_name(type(entry.tensor))}, which cannot be rebuilt")
        if entry.reason:
            raise UnplacedTensor(f"the tensor {path} cannot be rebuilt in an engine: {entry.reason}")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """[first, last) byte of ``tensor`` in its storage."""
    first = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was made from, which autograd keeps alive."""
    if tensor.is_inference():
        return None
    base: torch.Tensor | None = tensor._base
    return base


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A key that is equal for tensors that look into the same memory."""
    storage = tensor.untyped_storage()
    # Empty storages have no address to tell them apart, and nothing to share.
    return (storage.data_ptr(), 0) if storage.nbytes() else (0, id(tensor))


class _Storages:
    """Groups tensors by the memory they look into and gives each group a place in the set."""

    def __init__(self, loaded: Walk, device: torch.device, known: Known | None) -> None:
        self.device = device
        self.known = known
        self.tensors: dict[int, torch.Tensor] = {}
        self.groups: dict[tuple[int, int], list[FoundTensor]] = {}
        self.rows: list[manifest.Storage] = []
        self.row_of: dict[int, int] = {}
        self._storage_of: dict[int, tuple[int, int]] = {}  # tensor id → (storage row, first byte of the range)
        self._groups_in_order: list[tuple[int, list[FoundTensor]]] = []
        self.size = 0
        for entry in loaded.tensors:
            if known is not None and id(entry.tensor) in known.tensors:
                continue
            self.tensors.setdefault(id(entry.tensor), entry.tensor)
            if entry.tensor.device.type == device.type:
                self.groups.setdefault(_memory_of(entry.tensor), []).append(entry)
        self._place(loaded)

    def _place(self, loaded: Walk) -> None:
        groups = sorted(self.groups.values(), key=lambda entries: not _is_shared(entries, loaded))
        for entries in groups:
            extents = [_extent(entry.tensor) for entry in entries]
            # Ranges start at a multiple of the alignment inside their storage, so that every view keeps its own.
            first = min(start for start, _ in extents) // manifest.ALIGNMENT * manifest.ALIGNMENT
            last = max(end for _, end in extents)
            self.size = -(-self.size // manifest.ALIGNMENT) * manifest.ALIGNMENT
            for entry in entries:
                if (entry.tensor.storage_offset() * entry.tensor.element_size() - first) % entry.tensor.element_size():
                    raise ExportRefused(f"the tensor {loaded.path(entry.module, entry.steps)} is not aligned")
                self._storage_of[id(entry.tensor)] = (len(self.rows), first)
            self.rows.append(manifest.Storage(self.size, last - first, _is_shared(entries, loaded)))
            self._groups_in_order.append((first, entries))
            self.size += last - first
        self.size = -(-self.size // manifest.ALIGNMENT) * manifest.ALIGNMENT

    def tensor_rows(
        self, attributes: Mapping[int, tuple[str, ...]]
    ) -> tuple[tuple[manifest.Tensor, ...], tuple[bytes, ...]]:
        rows: list[manifest.Tensor] = []
        inline: list[bytes] = []
        for key, tensor in self.tensors.items():
            self.row_of[key] = len(rows)
            if key in self._storage_of:
                storage, first = self._storage_of[key]
                offset = (tensor.storage_offset() * tensor.element_size() - first) // tensor.element_size()
                stride = tuple(tensor.stride())
            else:  # a host tensor beside device weights travels by value
                value = tensor.detach().contiguous()
                inline.append(bytes(value.reshape(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else b"")
                storage, offset, stride = -len(inline), 0, tuple(value.stride())
            parameter = isinstance(tensor, nn.Parameter)
            rows.append(
                manifest.Tensor(
                    storage=storage,
                    offset=offset,
                    shape=tuple(tensor.shape),
                    stride=stride,
                    dtype=dtype_name(tensor.dtype),
                    kind="parameter" if parameter else "tensor",
                    cls=class_name(type(tensor)),
                    requires_grad=tensor.requires_grad,
                    attributes=attributes.get(key, ()),
                )
            )
        return tuple(rows), tuple(inline)

    def slot(self, entry: FoundTensor) -> manifest.Slot:
        key = id(entry.tensor)
        if self.known is not None and key in self.known.tensors:
            external = f"{self.known.role}:{self.known.tensors[key]}"
            return manifest.Slot(entry.module, entry.place, entry.steps, -1, external)
        return manifest.Slot(entry.module, entry.place, entry.steps, self.row_of[key])

    def pieces(self) -> list[Piece]:
        pieces = []
        for row, (first, entries) in zip(self.rows, self._groups_in_order, strict=True):
            tensors = {id(entry.tensor): entry.tensor for entry in entries}
            for base in [_base(tensor) for tensor in tensors.values()]:
                # A view keeps the tensor that it was made from, and with it the memory, which must go.
                if base is not None and first <= _extent(base)[0] and _extent(base)[1] <= first + row.bytes:
                    tensors.setdefault(id(base), base)
            storage = max((t.untyped_storage() for t in tensors.values()), key=lambda s: s.nbytes())
            source = torch.empty(0, dtype=torch.uint8, device=entries[0].tensor.device)
            if row.bytes:
                source.set_(storage, first, (row.bytes,), (1,))
            views = tuple((t, t.storage_offset() * t.element_size() - first) for t in tensors.values())
            pieces.append(Piece(row.offset, source, row.shared, views))
        return pieces


def _is_shared(entries: list[FoundTensor], loaded: Walk) -> bool:
    """Memory is shared when a weight lives in it, and nothing that is written while an engine serves.

    Waking SGLang's memory up writes every named buffer in place, and plain tensors may be workspaces: both are private.
    """
    return any(_is_weight(entry, loaded) for entry in entries) and not any(_is_written(entry) for entry in entries)


def _is_weight(entry: FoundTensor, loaded: Walk) -> bool:
    """A parameter, or what an object of the kernels' own holds in the place of one (gpt-oss's experts)."""
    if isinstance(entry.tensor, nn.Parameter):
        return True
    holder, _ = loaded.objects.get((entry.module, entry.steps[:-1]), ("", ()))
    return holder in manifest.WEIGHT_RECORDS and entry.steps[-1] == ("attr", "data")


def _is_written(entry: FoundTensor) -> bool:
    """A named buffer, or what the kernels' objects have for results: ``out_scale``, ``out_data``."""
    if entry.place in (manifest.BUFFER, manifest.TRANSIENT_BUFFER) and len(entry.steps) == 1:
        return True
    result = any(kind == "attr" and str(name).startswith("out_") for kind, name in entry.steps[1:])
    return result and not isinstance(entry.tensor, nn.Parameter)
