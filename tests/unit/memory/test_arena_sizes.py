"""How a set is split into arenas."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from weightcache.memory import GIB, LARGE_PAGE, MAX_ARENAS, arena_sizes

granularities = st.sampled_from([4096, 1 << 16, 2 << 20])


@given(total=st.integers(0, 1 << 44), granularity=granularities, arena=st.integers(0, 1 << 36))
def test_arenas_cover_the_set_and_fit_one_packet(total, granularity, arena):
    sizes = arena_sizes(total, granularity, arena)
    assert 1 <= len(sizes) <= MAX_ARENAS
    assert total <= sum(sizes) < max(total, 1) + granularity
    assert all(size > 0 and size % granularity == 0 for size in sizes)
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]


@given(total=st.integers(1, 1 << 44), granularity=granularities)
def test_default_size_is_one_gib_or_a_32nd(total, granularity):
    sizes = arena_sizes(total, granularity)
    assert len(sizes) <= 33
    if total <= 32 * GIB:
        assert max(sizes) <= GIB
    else:
        assert max(sizes) - total / 32 < LARGE_PAGE + granularity


@pytest.mark.parametrize(
    ("total", "count", "first"),
    [(0, 1, 1 << 16), (1, 1, 1 << 16), (GIB, 1, GIB), (GIB + 1, 2, GIB), (32 * GIB, 32, GIB), (64 * GIB, 32, 2 * GIB)],
)
def test_examples(total, count, first):
    sizes = arena_sizes(total, 1 << 16)
    assert len(sizes) == count
    assert sizes[0] == first
