"""Lets SGLang import its CUDA code, and construct and load models with it, on a machine without a GPU.

``torch.cuda`` answers as on an H200, kernel packages are there and empty, and tensors meant for it go elsewhere. What
needs no kernel runs. It shows which classes SGLang chooses there, and what names, shapes and objects loading leaves.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

KERNELS = ("sgl_kernel", "flashinfer", "vllm", "cutlass")
"""Packages of which SGLang's CUDA code imports names. They are not called here."""

_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    warp_size=32,
    gcnArchName="",
)


@dataclass(frozen=True)
class ScalarType:
    """sgl_kernel's description of a number of few bits, as far as Marlin's layouts ask for it."""

    name: str
    size_bits: int


class _Idle:
    """A stream or an event on which nothing happens."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass


class _Driver:
    """Triton asks its driver for the GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Empty(types.ModuleType):
    """A package in which every name is found."""

    __path__: MutableSequence[str] = []  # noqa: RUF012  as every module's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Elsewhere(TorchFunctionMode):  # type: ignore[misc]
    """Inside the block, what is meant for a GPU is made on the device ``target``."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and _is_gpu(device):
            kwargs["device"] = self.target
        if func is torch.Tensor.to:
            args = [self.target if _is_gpu(argument) else argument for argument in args]
        return func(*args, **kwargs)


def _is_gpu(value: object) -> bool:
    return isinstance(value, str | torch.device | int) and str(value).startswith(("cuda", "0"))


def gpu() -> None:
    """From now on, torch shows an H200 in this process."""
    sys.meta_path.insert(0, _Finder())
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": _H200,
        "get_device_name": _H200.name,
        "mem_get_info": (130 << 30, 140 << 30),
        "memory_allocated": 0,
        "memory_reserved": 0,
    }
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "current_stream"):
        answers[name] = None
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, _answer=answer, **_kwargs: _answer)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (_Idle,), {}))  # torch wants each of its names to be an object of its own
    triton.runtime.driver.set_active(_Driver())
    scalars = importlib.import_module("sgl_kernel.scalar_type")
    types_of_four_bits = {name: ScalarType(name, 4) for name in ("uint4", "uint4b8", "float4_e2m1f")}
    vars(scalars)["scalar_types"] = types.SimpleNamespace(
        **types_of_four_bits,
        **{name: ScalarType(name, 8) for name in ("uint8", "uint8b128", "float8_e4m3fn", "float8_e5m2")},
    )
    vars(scalars)["ScalarType"] = ScalarType
