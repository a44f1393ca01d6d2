"""Quantizers as the checkpoint formats define them: plain torch, one tensor at a time, weights as [out, in]."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of eight columns inside an int32, from the lowest four bits up."""
PLAIN_ORDER = tuple(range(8))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive numbers of four bits in MXFP4."""
MX_GROUP = 32
MX_BIAS = 127


def fp8_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for all: (float8, scale [])."""
    scale = weight.float().abs().amax() / FP8_MAX
    return (weight.float() / scale).to(FP8), scale


def fp8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each output: (float8, scale [out, 1])."""
    scale = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    return (weight.float() / scale).to(FP8), scale


def fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each block of 128 by 128, the last ones smaller: (float8, scale)."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / FP8_MAX
    return (weight.float() / spread(scale, weight.shape)).to(FP8), scale


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each weight, from the scales of blocks."""
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def int8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each output, symmetric: (int8, scale [out, 1])."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def int4_groups(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four bits, one scale and zero point for each ``group`` inputs: (codes [out, in], scales, zeros [out, groups]).

    A weight is ``(code - zero) * scale``; the zero is 8 when ``symmetric``.
    """
    parts = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scale = parts.abs().amax(2) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    codes = (parts / scale[..., None]).round() + zero[..., None]
    return codes.clamp(0, 15).flatten(1).to(torch.int32), scale, zero.to(torch.int32)


def pack(codes: torch.Tensor, dimension: int, order: tuple[int, ...] = PLAIN_ORDER) -> torch.Tensor:
    """Eight codes of four bits in an int32, along ``dimension``; ``order``: which code each four bits hold, upwards."""
    parts = codes.to(torch.int64).movedim(dimension, -1).unflatten(-1, (-1, len(order)))
    packed = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for position, index in enumerate(order):
        packed |= parts[..., index] << (4 * position)
    return packed.to(torch.int32).movedim(-1, dimension).contiguous()


def unpack(packed: torch.Tensor, dimension: int, order: tuple[int, ...] = PLAIN_ORDER) -> torch.Tensor:
    """The codes of ``pack``."""
    words = packed.movedim(dimension, -1)
    parts = torch.empty(*words.shape, len(order), dtype=torch.int32)
    for position, index in enumerate(order):
        parts[..., index] = (words >> (4 * position)) & 15
    return parts.flatten(-2).movedim(-1, dimension).contiguous()


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 along the last dimension: (two numbers a byte [..., groups, 16], exponents [..., groups], both uint8)."""
    parts = weight.float().unflatten(-1, (-1, MX_GROUP))
    largest = parts.abs().amax(-1).clamp(min=2.0**-100)
    exponent = (largest / E2M1[-1]).log2().ceil().clamp(-MX_BIAS, MX_BIAS)
    scaled = parts / exponent.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    codes = (nearest | (scaled < 0).to(torch.int64) << 3).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + MX_BIAS).to(torch.uint8)


def from_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers that ``mxfp4`` kept."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
    return (values * (exponents.float() - MX_BIAS).exp2()[..., None]).flatten(-2)
