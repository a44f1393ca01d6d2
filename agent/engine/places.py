"""Places in a module tree, as a manifest names them: what is there now, and what no set may touch."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from weightcache import manifest
from weightcache.errors import AttachFailed
from weightcache.loader.walk import MODULE_INTERNALS
from weightcache.manifest import Step


def check_name(name: str, allowed: str = "") -> None:
    """Torch's own tables are not for a manifest to replace."""
    if name in MODULE_INTERNALS and name != allowed:
        raise AttachFailed(f"{name} belongs to torch, and no set may replace it")


def clear(module: nn.Module, name: str, keep: Mapping[str, object]) -> None:
    """A name lives in one table only; the one that keeps it also keeps its order."""
    if name in keep:
        return
    for table in (module._parameters, module._buffers, vars(module)):
        if table is not keep and name in table:
            del table[name]


def held_in(module: nn.Module, slot: manifest.Slot) -> Any:
    """What the slot holds now; the tables are read directly, since Module.__getattr__ is slow."""
    if len(slot.steps) == 1:
        name = str(slot.steps[0][1])
        if slot.place == manifest.PARAMETER and name in module._parameters:
            return module._parameters[name]
        if slot.place in (manifest.BUFFER, manifest.TRANSIENT_BUFFER) and name in module._buffers:
            return module._buffers[name]
    return value_at(module, slot.steps)


def value_at(module: nn.Module, steps: Sequence[Step]) -> Any:
    """What ``steps`` lead to from ``module``, None where they lead nowhere."""
    value: Any = module
    for kind, step in steps:
        if value is None:
            return None
        value = _attribute(value, str(step)) if kind == "attr" else _item(value, step)
    return value


def _attribute(value: Any, name: str) -> Any:
    """What the object itself holds under ``name``: no property runs, and nothing is found on its class."""
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers):
            if name in table:
                return table[name]
    own = getattr(value, "__dict__", None)
    if own is not None and name in own:
        return own[name]
    for cls in type(value).__mro__:
        if isinstance(member := cls.__dict__.get(name), types.MemberDescriptorType):
            return member.__get__(value) if hasattr(value, name) else None
    return None


def _item(value: Any, step: str | int) -> Any:
    try:
        return value[step]
    except (KeyError, IndexError):
        return None
