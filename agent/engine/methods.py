"""How each layer of a loaded model computes: the resolved method objects, not a name in its configuration.

An "fp8" checkpoint can hold layers of other methods, an unquantized one can be quantized by an option, and one method
class lays its weights out in several ways. A *signature* names the classes and the switches that tell them apart.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator

from torch import nn

METHOD_ATTRIBUTES = ("quant_method", "scheme")
_PARTS = ("scheme", "kernel", "runner", "quant_config", "moe_runner_config")
_DEPTH = 3


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
    """``Class(switch=value, part=Class(...))``: switches are its truth values, enumerations and short texts."""
    words = []
    for name, value in sorted(vars(method).items() if hasattr(method, "__dict__") else ()):
        if isinstance(value, bool | enum.Enum) or (isinstance(value, str) and value.isidentifier()):
            words.append(f"{name}={value.name if isinstance(value, enum.Enum) else value}")
        elif name in _PARTS and value is not None and depth < _DEPTH and hasattr(value, "__dict__"):
            words.append(f"{name}={signature(value, depth + 1)}")
    return f"{type(method).__name__}({', '.join(words)})"
