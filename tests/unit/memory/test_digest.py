"""The digest notices every kind of damage it is there for, and never changes its mind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightcache.memory.digest import BLOCK, digest

BLOCK_BYTES = BLOCK * 8

# Digests are stored beside sets that outlive an upgrade: a change of these values is a change of the schema.
KNOWN = {
    0: "00000000000000000000000000000000",
    1: "4bc712a8717ddc59f87c9777e63773fb",
    8: "b723578e31cbb6edd79b8b44a0dedc7c",
    4097: "9f4293aa065d48051c69d4e0228fc981",
    BLOCK_BYTES: "9fcbdf5d8a2891eda5c4663e8a955fe7",
    5 * BLOCK_BYTES + 13: "149774a58b0291430934de29436fd93e",
}


def pattern(size: int) -> torch.Tensor:
    index = torch.arange(size, dtype=torch.int64)
    return ((index * 2654435761 + (index >> 13) * 40503 + 12345) >> 7).to(torch.uint8)


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("size", KNOWN)
def test_known_answers(size):
    assert digest(pattern(size)) == KNOWN[size]


def reference(data: bytes) -> str:
    """The construction of the module's docstring, written down once more in plain Python."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    def multiplier(table: int, place: int) -> int:
        return mix((table * BLOCK + place + 1) * 0x9E3779B97F4A7C15 & mask) | 1

    def sums(words: list[int]) -> list[int]:
        result = []
        for start in range(0, max(len(words), 1), BLOCK):
            first = second = 0
            for place, word in enumerate(words[start : start + BLOCK]):
                x = word * multiplier(0, place) & mask
                x ^= x >> 32
                x = x * multiplier(1, place) & mask
                x ^= x >> 32
                first += x
                second += x * multiplier(2, place)
            result += [first & mask, second & mask]
        return result

    padded = data + bytes(-len(data) % 8)
    words = sums([int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)])
    while len(words) > 2:
        words = sums(words)
    first = mix((words[0] + len(data) * 0x9E3779B97F4A7C15) & mask)
    return f"{first:016x}{mix(words[1] ^ first):016x}"


@pytest.mark.parametrize("size", [0, 5, 64, BLOCK_BYTES + 9])
def test_agrees_with_the_documented_construction(size):
    data = pattern(size)
    assert digest(data) == reference(bytes(data.tolist()))


def test_every_flipped_bit_changes_it():
    data = pattern(67)
    seen = {digest(data)}
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(digest(data))
            data[byte] ^= 1 << bit
    assert len(seen) == 67 * 8 + 1


@pytest.mark.parametrize("fill", [0, 255, None])
def test_two_flipped_top_bits_change_it(fill):
    size = 3 * BLOCK_BYTES
    data = pattern(size) if fill is None else torch.full((size,), fill, dtype=torch.uint8)
    seen = {digest(data)}
    places = [7, 15, 8 * 100 + 7, BLOCK_BYTES + 7, BLOCK_BYTES + 15, 2 * BLOCK_BYTES + 7]
    for i, first in enumerate(places):
        for second in places[i + 1 :]:
            damaged = data.clone()
            damaged[first] ^= 128
            damaged[second] ^= 128
            seen.add(digest(damaged))
    assert len(seen) == 16


@pytest.mark.parametrize("width", [2, 4, 8])
def test_flipped_signs_change_it(width):
    """All sign bits of two words: the pattern that negated weights leave, at any width of numbers."""
    words = torch.ones(4 * BLOCK, dtype=torch.int64)
    flip = sum(1 << (8 * end - 1) for end in range(width, 9, width))
    flip -= (flip >> 63) << 64
    seen = {digest(words.view(torch.uint8))}
    for first, second in ((0, 1), (0, BLOCK), (1, BLOCK + 1), (BLOCK - 1, BLOCK), (5, 6), (2 * BLOCK, 3 * BLOCK)):
        damaged = words.clone()
        damaged[first] ^= flip
        damaged[second] ^= flip
        seen.add(digest(damaged.view(torch.uint8)))
    assert len(seen) == 7


@pytest.mark.parametrize("pair", [(0, 1), (3, 900), (0, BLOCK), (17, BLOCK + 17), (BLOCK - 1, 2 * BLOCK)])
def test_swapped_words_change_it(pair):
    words = torch.arange(1, 2 * BLOCK + 2, dtype=torch.int64)
    before = digest(words.view(torch.uint8))
    words[list(pair)] = words[list(pair[::-1])]
    assert digest(words.view(torch.uint8)) != before


def test_swapped_blocks_change_it():
    data = pattern(4 * BLOCK_BYTES).view(4, -1)
    assert digest(data.flatten()) != digest(data[[0, 2, 1, 3]].flatten())


def test_length_counts_even_for_zeros():
    sizes = [0, 1, 7, 8, 9, 16, BLOCK_BYTES, BLOCK_BYTES + 8, 2 * BLOCK_BYTES]
    assert len({digest(torch.zeros(size, dtype=torch.uint8)) for size in sizes}) == len(sizes)
    data = pattern(100)
    assert digest(torch.cat([data, torch.zeros(1, dtype=torch.uint8)])) != digest(data)
    data[-1] = 0
    assert digest(data[:-1]) != digest(data)


@given(blocks=st.integers(0, 6), rest=st.integers(0, BLOCK_BYTES - 1), chunk=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_chunk_size_does_not_matter(blocks, rest, chunk):
    data = pattern(blocks * BLOCK_BYTES + rest)
    assert digest(data, chunk) == digest(data)


@given(data=st.binary(max_size=40), shift=st.integers(1, 9))
@settings(deadline=None)
def test_alignment_does_not_matter(data, shift):
    aligned = as_bytes(data)
    shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), aligned])[shift:]
    assert digest(shifted) == digest(aligned)


@given(first=st.binary(max_size=24), second=st.binary(max_size=24))
@settings(deadline=None)
def test_different_bytes_differ(first, second):
    assert (digest(as_bytes(first)) == digest(as_bytes(second))) == (first == second)


def test_more_than_one_level():
    """More than BLOCK / 2 blocks need a second level of block sums."""
    data = torch.zeros((BLOCK // 2 + 2) * BLOCK_BYTES, dtype=torch.uint8)
    before = digest(data)
    data[-1] = 1
    after = digest(data)
    assert after != before
    data[-1] = 0
    data[3] = 1
    assert digest(data) not in (before, after)


def test_default_device_is_not_used():
    with torch.device("meta"):
        assert digest(pattern_on_cpu := torch.ones(9, dtype=torch.uint8, device="cpu")) == digest(pattern_on_cpu, 3)


@pytest.mark.parametrize(
    "data", [torch.zeros(8), torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_anything_but_plain_bytes_is_refused(data):
    with pytest.raises(ValueError, match="contiguous bytes"):
        digest(data)
