"""Tensors over a mapped range: the only place that turns (offset, shape, stride, dtype) into a view."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """torch.bfloat16 for ``bfloat16``. Raises ValueError for anything that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an unknown dtype {name!r}")  # noqa: TRY004  the name is wrong, not its type
    return dtype


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one that a strided view touches, 0 for an empty one."""
    if 0 in shape:
        return 0
    # The sum of (size - 1) * step, without a Python loop.
    span: int = sum(map(operator.mul, shape, stride))
    return 1 + span - sum(stride)


def view(
    base: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A view of the uint8 tensor ``base`` that starts ``offset`` bytes in; ``stride`` is in elements of ``dtype``.

    Raises ValueError when it would leave ``base``.
    """
    elements = extent(shape, stride)
    end = offset + elements * dtype.itemsize
    if offset < 0 or end > base.numel():
        raise ValueError(f"a view of bytes {offset} to {end} in a range of {base.numel()}")
    if elements == 0:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=base.device)
    return base[offset:end].view(dtype).as_strided(tuple(shape), tuple(stride))
