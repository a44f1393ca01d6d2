"""gpt-oss's own format: experts in MXFP4, everything else in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tests.models import quantizers as q
from tests.models.formats import Format, Tensors

_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class _Experts(Format):
    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """All tensors, the experts' projections quantized."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            result |= self.quantize(name, tensor) if _EXPERTS.search(name) else {name: tensor}
        return result


def gpt_oss() -> Format:
    """Blocks of 32 inputs with one exponent, two numbers a byte."""

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        blocks, exponents = q.mxfp4(weight)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}

    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _Experts({"quant_method": "mxfp4", "modules_to_not_convert": left}, quantize)
