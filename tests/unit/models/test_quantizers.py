"""The quantizers keep what their formats can keep, and pack it where the formats say."""

from __future__ import annotations

import pytest
import torch

from tests.models import quantizers as q


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(192, 256, generator=torch.Generator().manual_seed(1)) * 0.1


def close(got: torch.Tensor, weight: torch.Tensor, share: float) -> bool:
    """Within ``share`` of the largest weight."""
    return bool((got - weight).abs().max() <= share * weight.abs().max())


def test_float8_with_one_scale_reaches_the_largest_number(weight: torch.Tensor) -> None:
    values, scale = q.fp8_tensor(weight)
    assert (values.dtype, scale.shape) == (torch.float8_e4m3fn, ())
    assert float(values.float().abs().max()) == q.FP8_MAX
    assert close(values.float() * scale, weight, 1 / 16)


def test_float8_with_a_scale_for_each_output(weight: torch.Tensor) -> None:
    weight[3] *= 100
    values, scale = q.fp8_channel(weight)
    assert scale.shape == (192, 1)
    assert all(close(row * s, w, 1 / 16) for row, s, w in zip(values.float(), scale, weight, strict=True))


def test_float8_in_blocks_the_last_ones_smaller(weight: torch.Tensor) -> None:
    weight[128:, 128:] *= 100
    values, scale = q.fp8_block(weight)
    assert scale.shape == (2, 2)
    assert float(scale[1, 1]) > 10 * float(scale[0, 0])
    whole = values.float() * q.spread(scale, weight.shape)
    assert close(whole[:128], weight[:128], 1 / 16)
    assert close(whole[128:, 128:], weight[128:, 128:], 1 / 16)


def test_int8_rounds_to_half_a_step(weight: torch.Tensor) -> None:
    values, scale = q.int8_channel(weight)
    assert int(values.abs().max()) == 127
    assert bool(((values * scale - weight).abs() <= scale * 0.5001).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_four_bits_round_to_half_a_step(weight: torch.Tensor, symmetric: bool) -> None:
    codes, scale, zero = q.int4_groups(weight, 64, symmetric)
    assert codes.shape == weight.shape
    assert scale.shape == zero.shape == (192, 4)
    assert 0 <= int(codes.min()) < int(codes.max()) <= 15
    parts = (codes.unflatten(1, (-1, 64)) - zero[..., None]) * scale[..., None]
    steps = 0.51 if symmetric else 1.01  # a zero point that was rounded cuts up to half a step off one end
    assert bool(((parts - weight.unflatten(1, (-1, 64))).abs() <= scale[..., None] * steps).all())


@pytest.mark.parametrize("order", [q.PLAIN_ORDER, q.AWQ_ORDER])
@pytest.mark.parametrize("dimension", [0, 1])
def test_packed_codes_come_back(dimension: int, order: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, (64, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    packed = q.pack(codes, dimension, order)
    assert packed.dtype == torch.int32
    assert packed.shape[dimension] * 8 == codes.shape[dimension]
    assert torch.equal(q.unpack(packed, dimension, order), codes)


def test_the_order_of_awq_is_that_of_its_kernel() -> None:
    """From the lowest four bits up: columns 0, 2, 4, 6, 1, 3, 5, 7."""
    packed = q.pack(torch.arange(8, dtype=torch.int32)[None], 1, q.AWQ_ORDER)
    assert int(packed) & 0xFFFFFFFF == 0x75316420


def test_plain_packing_has_the_first_code_lowest() -> None:
    packed = q.pack(torch.arange(8, dtype=torch.int32)[None], 1)
    assert int(packed) & 0xFFFFFFFF == 0x76543210


def test_mxfp4_keeps_its_own_numbers() -> None:
    values = torch.tensor([*q.E2M1, *(-v for v in q.E2M1)] * 2).repeat(3, 1) * torch.tensor([[1.0], [0.25], [4.0]])
    blocks, exponents = q.mxfp4(values)
    assert (blocks.shape, exponents.shape) == ((3, 1, 16), (3, 1))
    assert exponents.flatten().tolist() == [127, 125, 129]
    assert torch.equal(q.from_mxfp4(blocks, exponents), values)


def test_mxfp4_has_the_first_of_two_numbers_in_the_low_half() -> None:
    blocks, _ = q.mxfp4(torch.tensor([[6.0, -0.5] * 16]))
    assert set(blocks.flatten().tolist()) == {0x97}


def test_mxfp4_of_what_it_cannot_keep(weight: torch.Tensor) -> None:
    assert close(q.from_mxfp4(*q.mxfp4(weight)), weight, 0.2)
