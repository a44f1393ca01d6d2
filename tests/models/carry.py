"""A model loaded as on an H200, exported, and rebuilt in another one: what weightcache does, in one process on the CPU.

Quantization's repacking kernels need a GPU; stand-ins here give tensors of their shapes and types. The bytes are not
those of a GPU, but the names, views, objects and values that loading leaves are, and these are what a set must carry.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.models.pretend import Elsewhere

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TILE = 16


def _gptq_repack(codes: torch.Tensor, perm: torch.Tensor, size_k: int, **_sizes: int) -> torch.Tensor:
    assert perm.numel() in (0, size_k)
    return (codes.reshape(size_k // TILE, -1) * 3).contiguous()


def _awq_repack(codes: torch.Tensor, size_k: int, **_sizes: int) -> torch.Tensor:
    return (codes.reshape(size_k // TILE, -1) * 5).contiguous()


def _to_fp8(
    values: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        largest = values.float().abs()
        largest = largest.amax(-1, keepdim=True) if use_per_token_if_dynamic else largest.amax().reshape(1)
        scale = largest / FP8_MAX
    return (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _rows_to_fp8(values: torch.Tensor, group: int, **_options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert group == values.shape[-1]
    return _to_fp8(values, use_per_token_if_dynamic=True)


_QUANTIZATION = "sglang.srt.layers.quantization"
_KERNELS = "sglang.srt.hardware_backend.gpu.quantization"
STAND_INS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (f"{_KERNELS}.awq_kernels", "awq_marlin_repack", _awq_repack),
    (f"{_KERNELS}.gptq_kernels", "gptq_marlin_repack", _gptq_repack),
    (f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_wNa16", "gptq_marlin_repack", _gptq_repack),
    (f"{_QUANTIZATION}.utils", "scaled_fp8_quant", _to_fp8),
    (f"{_QUANTIZATION}.fp8", "scaled_fp8_quant", _to_fp8),
    (f"{_QUANTIZATION}.fp8", "per_token_group_quant_fp8", _rows_to_fp8),
)


@dataclass(frozen=True, slots=True)
class Carried:
    """Tensors of the loaded model, layers by method, in what the rebuilt one differs, milliseconds of each step.

    ``manifest`` is the encoded manifest's size in bytes. ``load`` includes SGLang's own loading and post-processing.
    """

    tensors: int
    methods: dict[str, int]
    deviations: list[str]
    manifest: int
    milliseconds: dict[str, float]


def carry(config: Any, load: Any) -> Carried:
    """Load, export, pack, rebuild, compare. Raises WeightcacheError."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader.loader import get_model_loader

    from weightcache import manifest
    from weightcache.engine import adapter, inventory
    from weightcache.engine.rebuild import rebuild
    from weightcache.engine.tree import look_through
    from weightcache.loader.export import export
    from weightcache.loader.pack import pack
    from weightcache.loader.walk import Walk, walk
    from weightcache.memory import arena_sizes, open_memory
    from weightcache.parity.inventory import compare

    for module, name, stand_in in STAND_INS:
        setattr(importlib.import_module(module), name, stand_in)
    loader = get_model_loader(load_config=load, model_config=config)
    built: list[Walk] = []
    clock = Clock()
    with (
        adapter.apart(),
        Elsewhere("cpu"),
        adapter.after_construction(lambda model: built.append(walk(model).without_tensors())),
    ):
        loaded = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    clock.mark("load")
    disk = inventory.take(loaded, "target", 0, adapter.version(), "")
    clock.mark("")
    exported = export(loaded, built[0], torch.device("cpu"))
    clock.mark("export")
    encoded = manifest.encode(exported.manifest)
    clock.mark("encode")
    body = manifest.decode(encoded)
    clock.mark("decode")
    memory = open_memory("host", 0)
    arenas = arena_sizes(body.bytes, memory.granularity, 0)
    region = memory.reserve(sum(arenas))
    pack(exported, region, arenas, keep_private=False)
    clock.mark("pack")
    with adapter.apart(), Elsewhere("meta"):
        fresh = adapter.build_on_meta(config, load)
    tree = look_through(fresh)
    clock.mark("build")
    rebuild(fresh, body, region.bytes_at(0, body.bytes), tree=tree)
    clock.mark("bind")
    attached = inventory.take(fresh.eval(), "target", 0, adapter.version(), "")
    rows = [f"{row.path}: {row.what}: {row.disk:.80} | {row.attached:.80}" for row in compare(disk, attached)]
    return Carried(len(disk.tensors), disk.methods, rows, len(encoded), clock.milliseconds)


class Clock:
    """Takes the time between marks; an empty name is not kept."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """What ran since the last mark was ``name``."""
        now = time.perf_counter()
        if name:
            self.milliseconds[name] = round((now - self._last) * 1000, 2)
        self._last = now
