"""Takes the inventory of a loaded model inside a serving engine, in the same way after a disk load and an attach."""

from __future__ import annotations

import enum
import gc
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcache.engine import adapter, methods
from weightcache.engine.observe import capability, role_of
from weightcache.loader.changes import dtype_name
from weightcache.loader.walk import Walk, class_name, switches, walk
from weightcache.manifest import ATTRIBUTE
from weightcache.parity import inventory as records
from weightcache.parity.inventory import Inventory, TensorRow


def write(directory: Path, runner: Any) -> None:
    """Write the inventory of what SGLang's ModelRunner ``runner`` just loaded into ``directory``."""
    model = runner.model
    device = next(iter(model.parameters())).device
    records.write(
        directory,
        take(
            model,
            role=role_of(runner.model_config, runner.load_config),
            rank=adapter.global_rank(),
            version=adapter.version(),
            capability=capability(device),
        ),
    )


def take(model: nn.Module, role: str, rank: int, version: str, capability: str) -> Inventory:
    """The inventory of ``model``. Hashes every tensor on the host: about a second for each GB."""
    found = walk(model)
    return Inventory(
        role=role,
        rank=rank,
        sglang_version=version,
        capability=capability,
        methods=methods.count(model),
        tensors=_tensors(found),
        values=_values(found),
        bytes=sum(end - start for start, end in {_span(entry.tensor) for entry in found.tensors}),
        unreached=_unreached(found),
    )


def _tensors(found: Walk) -> dict[str, TensorRow]:
    objects: dict[int, str] = {}
    rows = {}
    memory = _overlaps(found)
    for entry in found.tensors:
        path, tensor = found.path(entry.module, entry.steps), entry.tensor
        first, delta = memory[path]
        rows[path] = TensorRow(
            place=f"{entry.place} {entry.reason}".rstrip(),
            cls=class_name(type(tensor)),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=dtype_name(tensor.dtype),
            device=tensor.device.type,
            requires_grad=tensor.requires_grad,
            same=objects.setdefault(id(tensor), path),
            memory=first,
            delta=delta,
            sha256=sha256(tensor),
        )
    return rows


def _overlaps(found: Walk) -> dict[str, tuple[str, int]]:
    """Place → the first place (by address) of the run of memory that it lies in, and the distance in bytes.

    An attached engine's tensors all look into one mapping: only what really overlaps says something.
    """
    extents = [
        (str(entry.tensor.device), *_span(entry.tensor), found.path(entry.module, entry.steps))
        for entry in found.tensors
    ]
    result: dict[str, tuple[str, int]] = {}
    device, first, start, end = "", "", 0, 0
    for where, begin, stop, path in sorted(extents):
        if begin == stop:
            result[path] = (path, 0)  # no memory, whatever its address
            continue
        if where != device or begin >= end:
            device, first, start, end = where, path, begin, stop
        end = max(end, stop)
        result[path] = (first, begin - start)
    return result


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _values(found: Walk) -> dict[str, str]:
    rows = {found.path(*place): _text(value) for place, value in found.scalars.items()}
    for place, (kind, keys) in found.containers.items():
        rows[found.path(*place)] = f"{kind} {keys!r}"
    for place, (kind, names) in found.objects.items():
        rows[found.path(*place)] = f"{kind} {sorted(names)!r}"
    for place, target in found.aliases.items():
        rows[found.path(*place)] = f"-> {target if isinstance(target, str) else found.path(*target)}"
    rows |= {f"{switch.place}.{switch.name}[{switch.key!r}]": repr(switch.value) for switch in switches()}
    for (module, table), names in found.names.items():
        # The order of plain attributes means nothing.
        shown = tuple(sorted(names)) if table == ATTRIBUTE else names
        rows[f"{found.modules[module].paths[0]} {table}s".lstrip()] = repr(shown)
    for entry in found.modules:
        rows[f"{entry.paths[0]} module".lstrip()] = f"{class_name(type(entry.module))} {entry.paths!r}"
    return rows


def _text(value: object) -> str:
    return f"{class_name(type(value))}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's values in the order of their indices, whatever its strides and device."""
    flat = tensor.detach().reshape(-1).contiguous()
    data = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    return hashlib.sha256(data.cpu().numpy().data).hexdigest()


def _unreached(found: Walk) -> int:
    devices = {entry.tensor.device for entry in found.tensors if entry.tensor.device.type != "cpu"}
    reached = {(entry.tensor.device, entry.tensor.untyped_storage().data_ptr()) for entry in found.tensors}
    others: dict[tuple[torch.device, int], int] = {}
    for value in gc.get_objects() if devices else ():
        # Not isinstance: it asks strangers for their __class__, and some answer with a warning.
        if issubclass(type(value), torch.Tensor) and value.device in devices and value.layout is torch.strided:
            storage = value.untyped_storage()
            if (key := (value.device, storage.data_ptr())) not in reached:
                others[key] = storage.nbytes()
    return sum(others.values())
