"""Quantized checkpoint formats: a bfloat16 model's tensors as each quantizer writes them, and its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.models import quantizers as q

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[str, torch.Tensor], Tensors]

GROUP = 128
_QUANTIZED = re.compile(r"(_proj|_proj_with_mqa)\.weight$")


@dataclass(frozen=True, slots=True)
class Format:
    """``quantize`` gives the tensors of one layer from its name (without ``.weight``) and its weight."""

    config: dict[str, Any]
    quantize: Quantizer
    files: Mapping[str, Any] = field(default_factory=dict)
    """More configuration files, by name."""
    dtype: str = "bfloat16"

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """All tensors, those of projections quantized."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            if _QUANTIZED.search(name):
                result |= self.quantize(name.removesuffix(".weight"), tensor)
            else:
                result[name] = tensor.to(getattr(torch, self.dtype))
        return result


def input_scale(layer: str) -> torch.Tensor:
    """A calibrated scale; it differs from layer to layer, since a load takes the largest of fused ones."""
    return torch.tensor(0.02 + 0.001 * (sum(layer.encode()) % 7))


def fp8_block() -> Format:
    """Block FP8, as DeepSeek-V3 and Qwen3 publish it."""
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [q.BLOCK, q.BLOCK],
    }

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        values, scale = q.fp8_block(weight)
        return {f"{layer}.weight": values, f"{layer}.weight_scale_inv": scale}

    return Format(config, quantize)


def fp8_tensor(activations: str) -> Format:
    """FP8 with a scale for each weight, as AutoFP8 writes it; ``activations`` is ``static`` or ``dynamic``."""
    config = {"quant_method": "fp8", "activation_scheme": activations, "ignored_layers": ["lm_head"]}

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        values, scale = q.fp8_tensor(weight)
        found = {f"{layer}.weight": values, f"{layer}.weight_scale": scale}
        return found | ({f"{layer}.input_scale": input_scale(layer)} if activations == "static" else {})

    return Format(config, quantize)


def fp8_tensor_kv() -> Format:
    """The same with calibrated scales of the KV cache, none of them one."""
    weights = fp8_tensor("static")

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        found = weights.quantize(layer, weight)
        if layer.endswith(("k_proj", "v_proj")):
            found[f"{layer}.{layer[-6]}_scale"] = input_scale(layer) * 2
        return found

    return Format(weights.config | {"kv_cache_scheme": "static"}, quantize)


def modelopt_fp8() -> Format:
    """NVIDIA ModelOpt's FP8: described in a file of its own, with scales of the KV cache."""
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    described = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}
    return Format({}, fp8_tensor_kv().quantize, {"hf_quant_config.json": described})


def awq() -> Format:
    """AWQ's "gemm" layout: [in, out / 8], with zero points."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        codes, scale, zero = q.int4_groups(weight, GROUP, symmetric=False)
        return {
            f"{layer}.qweight": q.pack(codes.t(), 1, q.AWQ_ORDER),
            f"{layer}.qzeros": q.pack(zero.t(), 1, q.AWQ_ORDER),
            f"{layer}.scales": scale.t().contiguous().half(),
        }

    return Format(config, quantize, dtype="float16")


def gptq(desc_act: bool) -> Format:
    """GPTQ: [in / 8, out]; ``desc_act`` gives inputs to groups in an order of their own."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": desc_act,
        "sym": True,
        "lm_head": False,
        "true_sequential": True,
        "checkpoint_format": "gptq",
    }

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if desc_act:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, scale, zero = q.int4_groups(weight[:, order], GROUP, symmetric=True)
        place = order.argsort()
        return {
            f"{layer}.qweight": q.pack(codes[:, place].t(), 0),
            f"{layer}.qzeros": q.pack(zero.t() - 1, 1),  # this format keeps zeros less one
            f"{layer}.scales": scale.t().contiguous().half(),
            f"{layer}.g_idx": (place // GROUP).to(torch.int32),
        }

    return Format(config, quantize, dtype="float16")
