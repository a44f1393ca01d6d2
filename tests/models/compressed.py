"""The compressed-tensors formats, as llm-compressor writes them."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import quantizers as q
from tests.models.formats import GROUP, Format, Quantizer, Tensors, fp8_tensor

_autofp8 = fp8_tensor("static")


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, how: str, quantize: Quantizer) -> Format:
    """One group of all linear layers."""
    scheme = {"dynamic": False, "symmetric": True, "observer": "minmax", "group_size": None, **weights}
    inputs = activations and {"symmetric": True, "observer": None, "group_size": None, **activations}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": how,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return Format(config, quantize)


def _per_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}


def w8a8_fp8_tensor() -> Format:
    """W8A8-FP8 with one scale for each weight and calibrated activations."""
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        found = _autofp8.quantize(layer, weight)
        return {name: tensor.reshape(1) if tensor.ndim == 0 else tensor for name, tensor in found.items()}

    return _compressed(weights, activations, "float-quantized", quantize)


def w8a8_fp8_channel() -> Format:
    """W8A8-FP8 with a scale for each output and for each token."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        values, scale = q.fp8_channel(weight)
        return {f"{layer}.weight": values, f"{layer}.weight_scale": scale.to(torch.bfloat16)}

    return _compressed(weights, _per_token("float"), "float-quantized", quantize)


def w8a8_int8() -> Format:
    """W8A8-INT8 with a scale for each output and for each token."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        values, scale = q.int8_channel(weight)
        return {f"{layer}.weight": values, f"{layer}.weight_scale": scale.to(torch.bfloat16)}

    return _compressed(weights, _per_token("int"), "int-quantized", quantize)


def wna16() -> Format:
    """Weights of four bits in groups, packed along the inputs; activations stay."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "actorder": None}

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        codes, scale, _ = q.int4_groups(weight, GROUP, symmetric=True)
        return {
            f"{layer}.weight_packed": q.pack(codes, 1),
            f"{layer}.weight_scale": scale.to(torch.bfloat16),
            f"{layer}.weight_shape": torch.tensor(weight.shape),
        }

    return _compressed(weights, None, "pack-quantized", quantize)
