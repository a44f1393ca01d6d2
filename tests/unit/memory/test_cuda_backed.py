"""Addresses whose memory comes and goes, against a stand-in driver: amounts, roll-back after a failure of any call."""

from __future__ import annotations

import time

import pytest

from tests.unit.memory.fake_driver import GRANULARITY, CUresult, FakeDriver
from weightcache.errors import DeviceUnavailable, NoRoom
from weightcache.memory import cuda_backed
from weightcache.memory.cuda_backed import CudaBacked, Extents, rounded
from weightcache.memory.cuda_vmm import CudaMemory

SPANS = (3 * GRANULARITY, 2 * GRANULARITY - 5)


def starts(*sizes: int) -> list[Extents]:
    """The first bytes of each range."""
    return [[(0, size)] for size in sizes]


FIRST = starts(1, 1)
ALL = starts(*SPANS)


def made(driver: FakeDriver) -> CudaBacked:
    return CudaBacked(CudaMemory(0, driver), SPANS)


def test_memory_comes_and_goes_behind_the_same_addresses() -> None:
    driver = FakeDriver()
    free = driver.free
    backed = made(driver)
    assert (backed.backed, driver.free) == (0, free)
    backed.back(FIRST)
    assert backed.backed == 2 * GRANULARITY
    addresses = set(driver.mapped)
    backed.back(ALL)
    assert backed.backed == 5 * GRANULARITY == free - driver.free
    assert set(driver.access.values()) == {"READWRITE"}
    everything = dict(driver.mapped)
    backed.give_back(FIRST)
    assert set(driver.mapped) == addresses
    assert driver.free == free - 2 * GRANULARITY
    backed.back(ALL)
    assert {address: size for address, (size, _) in driver.mapped.items()} == {
        address: size for address, (size, _) in everything.items()
    }
    backed.close()
    driver.assert_clean()
    assert driver.free == free


def test_a_piece_that_is_still_wanted_stays() -> None:
    driver = FakeDriver()
    backed = made(driver)
    backed.back(ALL)
    backed.give_back(starts(2 * GRANULARITY, 0))
    assert backed.backed == 3 * GRANULARITY
    backed.close()
    driver.assert_clean()


def test_the_device_is_done_before_memory_goes() -> None:
    driver = FakeDriver()
    backed = made(driver)
    backed.back(ALL)
    driver.calls.clear()
    backed.give_back(starts(0, 0))
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuMemUnmap")


def test_without_room_nothing_changes() -> None:
    driver = FakeDriver(free=4 * GRANULARITY)
    backed = made(driver)
    backed.back(FIRST)
    with pytest.raises(NoRoom, match="out of memory"):
        backed.back(ALL)
    assert backed.backed == 2 * GRANULARITY == 4 * GRANULARITY - driver.free
    driver.free += 8 * GRANULARITY
    backed.back(ALL)
    assert backed.backed == 5 * GRANULARITY


def test_what_there_is_is_kept_while_the_rest_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(free=4 * GRANULARITY)
    backed = made(driver)
    backed.back(FIRST)
    driver.calls.clear()

    def slept(_: float) -> None:
        driver.free += GRANULARITY

    monkeypatch.setattr(cuda_backed.time, "sleep", slept)
    assert backed.back(ALL, time.monotonic() + 20) > 0
    assert backed.backed == 5 * GRANULARITY
    assert "cuMemUnmap" not in driver.calls
    assert backed.back(ALL, time.monotonic() + 20) == 0


def test_without_room_in_time_nothing_changes() -> None:
    driver = FakeDriver(free=4 * GRANULARITY)
    backed = made(driver)
    backed.back(FIRST)
    begin = time.monotonic()
    with pytest.raises(NoRoom, match="out of memory"):
        backed.back(ALL, begin + 0.05)
    assert 0.05 <= time.monotonic() - begin < 5
    assert backed.backed == 2 * GRANULARITY == 4 * GRANULARITY - driver.free


def test_another_failure_is_not_waited_for() -> None:
    driver = FakeDriver(error=CUresult.CUDA_ERROR_UNKNOWN)
    backed = made(driver)
    backed.back(FIRST)
    driver.fail_at = len(driver.calls) + _calls().index("cuMemCreate")
    with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_UNKNOWN"):
        backed.back(ALL, time.monotonic() + 60)
    assert backed.backed == 2 * GRANULARITY


def _calls() -> list[str]:
    driver = FakeDriver()
    backed = made(driver)
    backed.back(FIRST)
    driver.calls.clear()
    backed.back(ALL)
    return driver.calls


@pytest.mark.parametrize(("index", "call"), list(enumerate(_calls())))
def test_a_failure_of_any_call_rolls_back(index: int, call: str) -> None:
    driver = FakeDriver(error=CUresult.CUDA_ERROR_UNKNOWN)
    backed = made(driver)
    backed.back(FIRST)
    driver.fail_at = len(driver.calls) + index
    if call in ("cuMemRelease", "cuCtxPopCurrent"):
        backed.back(ALL)
        return
    with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_UNKNOWN"):
        backed.back(ALL)
    assert backed.backed == 2 * GRANULARITY
    assert len(driver.mapped) == 2
    assert not driver.handles


def test_what_does_not_fit_the_ranges_is_refused() -> None:
    backed = made(FakeDriver())
    for parts, why in (
        (starts(4 * GRANULARITY, 0), "of a range of"),
        (starts(0), "parts of 1 ranges, of which there are 2"),
        (starts(-GRANULARITY, 0), "no part of a range"),
        ([[(2, 1)], []], "no part of a range"),
        ([[(GRANULARITY, 2 * GRANULARITY), (0, 1)], []], "no part of a range"),
    ):
        with pytest.raises(ValueError, match=why):
            backed.back(parts)


def test_large_ranges_are_backed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backed, "PIECE", 2 * GRANULARITY)
    driver = FakeDriver()
    backed = CudaBacked(CudaMemory(0, driver), (5 * GRANULARITY,))
    backed.back(starts(GRANULARITY))
    backed.back(starts(5 * GRANULARITY))
    assert [size // GRANULARITY for _, (size, _) in sorted(driver.mapped.items())] == [1, 2, 2]
    backed.give_back(starts(GRANULARITY))
    assert backed.backed == GRANULARITY
    driver.free = 3 * GRANULARITY
    with pytest.raises(NoRoom):
        backed.back(starts(5 * GRANULARITY))
    assert (backed.backed, driver.free) == (GRANULARITY, 3 * GRANULARITY)
    backed.close()
    driver.assert_clean()


PLACES = [(0, 1), (2 * GRANULARITY + 5, 3 * GRANULARITY), (5 * GRANULARITY - 1, 5 * GRANULARITY)]
"""In granules: the first, the third and the fifth of seven."""


def granules(driver: FakeDriver) -> list[tuple[int, int]]:
    """Where memory is behind the only range, and how much, in granules."""
    (base,) = driver.reserved
    return [((at - base) // GRANULARITY, size // GRANULARITY) for at, (size, _) in sorted(driver.mapped.items())]


def test_parts_in_the_middle_stay_while_what_is_around_them_comes_and_goes() -> None:
    driver = FakeDriver()
    backed = CudaBacked(CudaMemory(0, driver), [7 * GRANULARITY])
    backed.back([PLACES])
    assert granules(driver) == [(0, 1), (2, 1), (4, 1)]
    for _ in range(2):
        backed.back([[(0, 7 * GRANULARITY)]])
        assert granules(driver) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
        assert backed.backed == 7 * GRANULARITY
        backed.give_back([PLACES])
        assert granules(driver) == [(0, 1), (2, 1), (4, 1)]
    driver.free = 3 * GRANULARITY
    with pytest.raises(NoRoom):
        backed.back([[(0, 7 * GRANULARITY)]])
    assert granules(driver) == [(0, 1), (2, 1), (4, 1)]
    backed.close()
    driver.assert_clean()


def test_parts_that_touch_are_one() -> None:
    g = GRANULARITY
    parts = [(0, 1), (5, g), (g - 1, g + 1), (3 * g, 3 * g), (4 * g + 1, 5 * g)]
    assert rounded(parts, g) == [(0, 2 * g), (4 * g, 5 * g)]
    assert rounded([], g) == []
    assert rounded([(0, 4 * g), (g, 2 * g), (5 * g, 6 * g)], g) == [(0, 4 * g), (5 * g, 6 * g)]


def test_memory_is_zero_when_it_comes_where_that_is_asked_for() -> None:
    driver = FakeDriver()
    backed = CudaBacked(CudaMemory(0, driver), [7 * GRANULARITY], zeroed=True)
    backed.back([PLACES])
    assert sorted(driver.cleared) == [(address, size) for address, (size, _) in sorted(driver.mapped.items())]
    kept = set(driver.mapped)
    driver.cleared.clear()
    driver.calls.clear()
    backed.back([[(0, 7 * GRANULARITY)]])
    assert {address for address, _ in driver.cleared} == set(driver.mapped) - kept  # what stayed has its content
    assert driver.calls.index("cuMemsetD8") < driver.calls.index("cuCtxSynchronize")
    backed.back([[(0, 7 * GRANULARITY)]])
    assert driver.calls.count("cuCtxSynchronize") == 1
    backed.give_back([PLACES])
    driver.fail_at = len(driver.calls) + 1 + 3 * 4  # after a context was pushed and three pieces were mapped
    with pytest.raises(DeviceUnavailable):
        backed.back([[(0, 7 * GRANULARITY)]])
    assert driver.calls[driver.fail_at] == "cuMemsetD8"
    assert set(driver.mapped) == kept
    backed.close()
    driver.assert_clean()
