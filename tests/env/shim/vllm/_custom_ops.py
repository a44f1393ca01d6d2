"""The kernels that SGLang imports from vLLM on every platform but CUDA."""

from typing import NoReturn


def _kernel(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("the test engine has no vLLM kernels: this path was never meant to run on a CPU")


rms_norm = fused_add_rms_norm = rotary_embedding = _kernel
