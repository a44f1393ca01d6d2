"""Addresses whose memory comes and goes, against a stand-in driver: amounts, roll-back after a failure of any call."""

from __future__ import annotations

import time

import pytest

from tests.unit.memory.fake_driver import GRANULARITY, CUresult, FakeDriver
from weightcache.errors import DeviceUnavailable, NoRoom
from weightcache.memory import cuda_backed
from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaMemory

SPANS = (3 * GRANULARITY, 2 * GRANULARITY - 5)
FIRST = (1, 1)
ALL = SPANS


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
    backed.give_back((2 * GRANULARITY, 0))
    assert backed.backed == 3 * GRANULARITY
    backed.close()
    driver.assert_clean()


def test_the_device_is_done_before_memory_goes() -> None:
    driver = FakeDriver()
    backed = made(driver)
    backed.back(ALL)
    driver.calls.clear()
    backed.give_back((0, 0))
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
    for sizes in ((4 * GRANULARITY, 0), (0,), (-GRANULARITY, 0)):
        with pytest.raises(ValueError, match="not those of the ranges"):
            backed.back(sizes)


def test_large_ranges_are_backed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backed, "PIECE", 2 * GRANULARITY)
    driver = FakeDriver()
    backed = CudaBacked(CudaMemory(0, driver), (5 * GRANULARITY,))
    backed.back((GRANULARITY,))
    backed.back((5 * GRANULARITY,))
    assert [size // GRANULARITY for _, (size, _) in sorted(driver.mapped.items())] == [1, 2, 2]
    backed.give_back((GRANULARITY,))
    assert backed.backed == GRANULARITY
    driver.free = 3 * GRANULARITY
    with pytest.raises(NoRoom):
        backed.back((5 * GRANULARITY,))
    assert (backed.backed, driver.free) == (GRANULARITY, 3 * GRANULARITY)
    backed.close()
    driver.assert_clean()
