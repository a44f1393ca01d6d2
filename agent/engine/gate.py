"""Which layers may be carried: decided by the resolved method objects of the loaded model, not by a name in its config.

An "fp8" checkpoint can hold layers of other methods, and an unquantized one can be quantized by an option. What is
listed here has been shown to be equal, bit for bit, between a disk load and an attach.
"""

from __future__ import annotations

from torch import nn

from weightcache.errors import UnsupportedMethod

PROVEN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
METHOD_ATTRIBUTES = ("quant_method", "scheme")


def check(model: nn.Module, unproven: bool = False) -> None:
    """Raise UnsupportedMethod, naming the method and the first layer that uses it; ``unproven`` lets all pass."""
    if unproven:
        return
    for path, module in model.named_modules():
        for name in METHOD_ATTRIBUTES:
            method = getattr(module, name, None)
            if method is not None and not isinstance(method, str) and type(method).__name__ not in PROVEN:
                raise UnsupportedMethod(
                    f"layer {path} uses {type(method).__name__}, which weightcache does not support yet: "
                    "only unquantized models can be cached"
                )
