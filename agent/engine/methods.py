"""How each layer of a loaded model computes: the resolved method objects, not a name in its configuration.

An "fp8" checkpoint can hold layers of other methods, an unquantized one can be quantized by an option, and one method
class lays its weights out in several ways. A *signature* names the classes and everything plain that they hold, down to
the functions that were chosen: two layers of one signature went through the same code with the same switches.
"""

from __future__ import annotations

import collections
import enum
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightcache.loader.walk import MODULE_INTERNALS

METHOD_ATTRIBUTES = ("quant_method", "scheme")
_DEPTH = 4
_MOST_ITEMS = 32
# Which layer it is, how large it is, which layers are exempt and which experts a token goes to, make no difference to
# how weights are laid out: of these, SGLang's post-processing reads sizes alone, and kernels what they route by.
_LEFT_OUT = re.compile(
    r"(layer|prefix)(_?(id|idx|index|name|num))?|.*_prefix|.*shape|num_.*|.*_size_per_.*|hidden_size.*|logical_widths"
    r"|ignored?(_layers)?|packed_modules_mapping|top_k|routing_method_type|routed_scaling_factor"
)

_SCALARS = (bool, int, float, torch.dtype)


def count(model: nn.Module) -> dict[str, int]:
    """Signature → how many layers use it."""
    return dict(collections.Counter(signature for _, signature in signatures(model)))


def signatures(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(path, signature) of every layer that has a method."""
    for path, module in model.named_modules():
        for name in METHOD_ATTRIBUTES:
            method = getattr(module, name, None)
            if method is not None and not isinstance(method, str):
                yield path, signature(method)


def signature(method: object, depth: int = 0) -> str:
    """``module.Class(name=value, part=Class(...))``, names in alphabetical order.

    Values are numbers, truth values, types, enumerations, short words, functions by their names, and lists and tables
    of those, as far as they say something. Objects of SGLang's are followed; tensors, modules and everybody else's
    objects are not.
    """
    words = []
    for name, value in sorted(vars(method).items() if hasattr(method, "__dict__") else ()):
        if left_out(name) or name in MODULE_INTERNALS or name.startswith("__"):
            continue
        if text := _text(value, depth):
            words.append(f"{name}={text}")
    cls = type(method)
    prefix = "" if depth else f"{cls.__module__}."
    return f"{prefix}{cls.__qualname__}({', '.join(words)})"


def left_out(name: str) -> bool:
    """Whether signatures do not name the attribute ``name``, since no layout depends on it."""
    return _LEFT_OUT.fullmatch(name) is not None


def _text(value: Any, depth: int) -> str:
    """A value as part of a signature; empty for one that says nothing, or too much."""
    match value:
        case enum.Enum():
            return value.name
        case str():
            return value if value.isidentifier() else ""
        case _ if isinstance(value, _SCALARS):
            return str(value)
        case list() | tuple() | set() | frozenset():
            return _items(sorted(value, key=repr) if isinstance(value, set | frozenset) else value, depth)
        case dict():
            keys, items = _items(list(value), depth), _items(list(value.values()), depth)
            return f"{keys}:{items}" if keys and items else ""
        case type():
            return value.__qualname__
        case functools.partial():
            return _text(value.func, depth)
        case types.FunctionType() | types.BuiltinFunctionType() | types.MethodType():
            return f"{value.__module__}.{value.__qualname__}"
    if depth < _DEPTH and type(value).__module__.partition(".")[0] == "sglang" and not isinstance(value, nn.Module):
        return signature(value, depth + 1)
    return ""


def _items(values: list[Any] | tuple[Any, ...], depth: int) -> str:
    texts = [_text(value, depth) for value in values[:_MOST_ITEMS]]
    return f"[{' '.join(texts)}]" if all(texts) and 0 < len(values) <= _MOST_ITEMS else ""
