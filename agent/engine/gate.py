"""Which layers may be shared: decided by the resolved method objects of the loaded model, not by a name in its config.

An "fp8" checkpoint can hold layers of other methods, and an unquantized one can be quantized by an option.
"""

from __future__ import annotations

from torch import nn

from weightcache.engine import evidence, methods
from weightcache.errors import UnsupportedMethod


def check(model: nn.Module, sglang: str, capability: str) -> None:
    """Raise UnsupportedMethod, naming the first method without evidence and the first layer that uses it.

    ``sglang`` is SGLang's version, ``capability`` the device's compute capability, empty for a CPU. Raises ConfigError
    for broken evidence.
    """
    known = evidence.all_known()
    passed: set[str] = set()
    for path, signature in methods.signatures(model):
        if signature in passed:
            continue
        if evidence.find(known, signature, sglang, capability) is None:
            name = signature.partition("(")[0].rpartition(".")[2]
            where = f"compute capability {capability}" if capability else "CPUs"
            if others := evidence.elsewhere(known, signature, sglang):
                where += f", but on {' and '.join(others)}"
            raise UnsupportedMethod(
                f"layer {path} uses {name}, which is not proven for sharing on {where}: `wcache parity --record` "
                'compares this model with a disk load and allows it, [policy] unproven = "check" checks every load'
            )
        passed.add(signature)
