"""Random weights for made-up checkpoints, drawn so that a model of them says something definite."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

CONFIDENT = 4.0
"""The spread of the output head's logits: the best token should stand out, so that equal text means something."""


def draw(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A bfloat16 tensor for every name. Each depends on its own name and size alone."""
    return {name: _one(name, size).to(torch.bfloat16) for name, size in sizes.items()}


def _one(name: str, size: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if name.endswith("A_log"):
        return noise.abs().add(1).log()  # the decay of a state-space layer: A is negative, and not far from -1
    if name.endswith(("lm_head.weight", "head.weight")):
        return noise * CONFIDENT * size[-1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return noise
    if len(size) > 1:
        fan_in = 1
        for dimension in size[1:]:
            fan_in *= dimension
        return noise * fan_in**-0.5
    # Norms are drawn around one: all ones would hide two norms that changed places.
    centre = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight", ".D")) else 0.0
    return centre + noise * 0.1
