"""A position-dependent 128-bit digest of a byte range, computed with torch, bit-equal on CPU and GPU.

It detects damage: flipped bits, moved, swapped, lost or foreign bytes. It does not detect attacks: whoever knows the
construction can make two byte ranges with the same digest. All arithmetic is on 64-bit words modulo 2**64.

Construction, on little-endian words ``w``, zero-padded at the end of the bytes:

1. Blocks of BLOCK words. Word ``j`` of a block goes through a bijection that depends on its place,

       x = w * M1[j];   x ^= x >>> 32;   x *= M2[j];   x ^= x >>> 32;   y = x * M3[j]

   with odd pseudo-random multipliers (splitmix64, see ``_tables``). The block becomes two words: the sum of its ``x``
   and the sum of its ``y``. The shifts carry high bits down: without them two flipped top bits would cancel in any sum
   of products, whatever the multipliers.
2. While there is more than one block, the sums (x, y of block 0, x, y of block 1, ...) are the words of the next level.
3. The two sums of the last block are each combined with the number of bytes and finished with splitmix64's mixer.

Every step is a bijection of each single input, so a change inside one word always changes the digest; any other change
goes unnoticed with a probability of the order of 2**-90 or less. A zero word contributes nothing to a sum, which is why
padding costs nothing and why the length is mixed in. Chunk sizes below only bound the scratch memory: sums do not
depend on the order of their terms.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 8192
"""Words in a block: 64 KiB."""

CPU_CHUNK = 128
"""Blocks processed at a time on a CPU: 8 MiB of scratch memory; smaller ones pay for more thread barriers."""

DEVICE_CHUNK = 1024
"""Blocks processed at a time on a GPU: 64 MiB of scratch memory, enough to hide the cost of launching kernels."""

_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's constants (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""


def digest(data: torch.Tensor, chunk: int = 0) -> str:
    """32 hex digits for the bytes of a contiguous one-dimensional uint8 tensor on any device.

    ``chunk`` is the number of blocks processed at a time (0: by the kind of device); it does not change the result.
    Synchronizes with the device. Raises ValueError for any other kind of tensor.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"a digest needs contiguous bytes, not {data.dtype} of shape {tuple(data.shape)}")
    length = data.numel()
    sums = _level(data, chunk or (CPU_CHUNK if data.device.type == "cpu" else DEVICE_CHUNK))
    while sums.shape[0] > 1:
        sums = _level(sums.view(-1).view(torch.uint8), chunk or CPU_CHUNK)
    first, second = (value & _MASK for value in sums.view(-1).tolist())
    first = _mix((first + length * _GOLDEN) & _MASK)
    second = _mix((second ^ first) & _MASK)
    return f"{first:016x}{second:016x}"


def _level(data: torch.Tensor, chunk: int) -> torch.Tensor:
    """The two sums of each block of ``data`` (uint8, 1-d): int64 of shape (blocks, 2), on the device of ``data``."""
    device = data.device
    tables = _tables(device)
    block_bytes = BLOCK * 8
    whole, rest = divmod(data.numel(), block_bytes)
    sums = torch.zeros((max(whole + (rest > 0), 1), 2), dtype=torch.int64, device=device)
    scratch = torch.empty((min(chunk, whole) or 1, BLOCK), dtype=torch.int64, device=device)
    for start in range(0, whole, chunk):
        stop = min(start + chunk, whole)
        words = _words(data[start * block_bytes : stop * block_bytes]).view(-1, BLOCK)
        _blocks(words, tables, scratch[: stop - start], sums[start:stop])
    if rest:
        words = _words(data[whole * block_bytes :])
        count = words.numel()
        _blocks(words.view(1, -1), tables[:, :count], scratch[:1, :count], sums[whole:])
    return sums


def _words(data: torch.Tensor) -> torch.Tensor:
    """``data`` as int64 words, zero-padded at the end; a copy only where length or address is not a multiple of 8."""
    size = data.numel()
    if size % 8 == 0 and data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0:
        return data.view(torch.int64)
    padded = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[:size] = data
    return padded.view(torch.int64)


def _blocks(words: torch.Tensor, tables: torch.Tensor, scratch: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sums of each row of ``words`` (rows, n <= BLOCK) to ``sums`` (rows, 2); ``scratch`` is like words."""
    halves = scratch.view(torch.int32).view(*scratch.shape, 2)  # little-endian: low, high
    low, high = halves[..., 0], halves[..., 1]
    torch.mul(words, tables[0], out=scratch)
    low.bitwise_xor_(high)
    scratch.mul_(tables[1])
    low.bitwise_xor_(high)
    torch.sum(scratch, dim=1, out=sums[:, 0])
    scratch.mul_(tables[2])
    torch.sum(scratch, dim=1, out=sums[:, 1])


@functools.cache
def _tables(device: torch.device) -> torch.Tensor:
    """M1, M2, M3: odd int64 of shape (3, BLOCK); entry (k, j) is splitmix64's output number k * BLOCK + j + 1, odd."""
    value = torch.arange(1, 3 * BLOCK + 1, dtype=torch.int64, device="cpu") * _signed(_GOLDEN)
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        # Shifts of int64 are arithmetic in torch: the mask makes them logical.
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (value | 1).view(3, BLOCK).to(device)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX1 & _MASK
    value = (value ^ (value >> 27)) * _MIX2 & _MASK
    return value ^ (value >> 31)
