"""CUDA VMM arenas against a stand-in driver: order of calls, roll-back after a failure of any call, sentences."""

from __future__ import annotations

import os

import pytest

from tests.unit.memory.fake_driver import GRANULARITY, CUresult, FakeDriver, open_arena_fds
from weightcache.errors import AttachFailed, DeviceUnavailable, NoRoom, WeightcacheError
from weightcache.memory.cuda_vmm import CudaMemory, device_count, device_of_uuid, device_uuid

CLEANUP = ("cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuCtxPopCurrent")


def close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def publish_and_map(driver: FakeDriver) -> None:
    """Two arenas made, published and mapped again; whatever happens, the caller's own resources are given back."""
    memory = CudaMemory(0, driver)
    region = memory.reserve(3 * GRANULARITY)
    fds: tuple[int, ...] = ()
    reader = None
    try:
        region.extend(2 * GRANULARITY)
        region.extend(GRANULARITY)
        fds = region.freeze()
        assert memory.free_bytes() == driver.free
        reader = memory.map(fds, (2 * GRANULARITY, GRANULARITY))
        assert reader.size == 3 * GRANULARITY
        assert set(driver.access.values()) == {"READ"}
    finally:
        region.close()
        close_all(fds)
        if reader is not None:
            reader.close()


def test_full_cycle_leaves_nothing_behind():
    driver = FakeDriver()
    publish_and_map(driver)
    driver.assert_clean()
    # The descriptor keeps the allocation, so no handle outlives its extend or its import.
    assert driver.calls.count("cuMemCreate") == 2
    assert driver.calls.count("cuMemImportFromShareableHandle") == 2
    assert driver.calls.count("cuMemRelease") == 4


def _calls_of_a_full_cycle() -> list[str]:
    driver = FakeDriver()
    publish_and_map(driver)
    return driver.calls


@pytest.mark.parametrize("error", [CUresult.CUDA_ERROR_UNKNOWN, CUresult.CUDA_ERROR_OUT_OF_MEMORY])
@pytest.mark.parametrize(("index", "call"), list(enumerate(_calls_of_a_full_cycle())))
def test_failure_of_any_call_rolls_back(index, call, error):
    driver = FakeDriver(fail_at=index, error=error)
    raised = None
    try:
        publish_and_map(driver)
    except WeightcacheError as caught:
        raised = caught
    if raised is None:
        # Only calls that give something back may fail without a word.
        assert call in (*CLEANUP, "cuCtxSynchronize", "cuCtxPushCurrent")
    else:
        assert error.name in raised.message
        assert call in raised.message
        no_room = error is CUresult.CUDA_ERROR_OUT_OF_MEMORY and call != "cuInit"
        assert isinstance(raised, NoRoom if no_room else (AttachFailed, DeviceUnavailable))
    if call not in CLEANUP and not (call == "cuCtxPushCurrent" and driver.reserved):
        driver.assert_clean()
    assert open_arena_fds() == []


def test_writer_is_writable_until_frozen_and_then_read_only():
    driver = FakeDriver()
    region = CudaMemory(0, driver).reserve(2 * GRANULARITY)
    region.extend(GRANULARITY)
    region.extend(GRANULARITY)
    assert list(driver.access.values()) == ["READWRITE", "READWRITE"]
    fds = region.freeze()
    assert list(driver.access.values()) == ["READ", "READ"]
    assert driver.calls.index("cuCtxSynchronize") < len(driver.calls) - 1 - driver.calls[::-1].index("cuMemSetAccess")
    assert all(not os.get_inheritable(fd) for fd in fds)
    with pytest.raises(ValueError, match="frozen: True"):
        region.extend(GRANULARITY)
    region.close()
    assert len(open_arena_fds()) == 2, "published descriptors are the caller's"
    close_all(fds)
    driver.assert_clean()


def test_unpublished_arenas_die_with_their_region():
    driver = FakeDriver()
    region = CudaMemory(0, driver).reserve(GRANULARITY)
    region.extend(GRANULARITY)
    region.close()
    region.close()
    driver.assert_clean()


def test_reserve_rounds_up_and_empty_ranges_work():
    driver = FakeDriver()
    memory = CudaMemory(0, driver)
    region = memory.reserve(GRANULARITY + 1)
    assert list(driver.reserved.values()) == [2 * GRANULARITY]
    region.close()
    empty = memory.map((), ())
    assert empty.size == 0
    empty.close()
    driver.assert_clean()


@pytest.mark.parametrize("size", [0, -GRANULARITY, GRANULARITY + 1, 3 * GRANULARITY])
def test_arenas_of_impossible_sizes_are_refused(size):
    driver = FakeDriver()
    region = CudaMemory(0, driver).reserve(2 * GRANULARITY)
    with pytest.raises(ValueError, match="no arena"):
        region.extend(size)
    region.close()
    driver.assert_clean()


def test_full_device_is_no_room():
    driver = FakeDriver(free=GRANULARITY)
    region = CudaMemory(0, driver).reserve(2 * GRANULARITY)
    with pytest.raises(NoRoom, match="GPU 0 is out of memory"):
        region.extend(2 * GRANULARITY)
    region.close()
    driver.assert_clean()


def test_descriptor_that_is_no_arena_is_refused():
    driver = FakeDriver()
    with open(os.devnull) as file, pytest.raises(AttachFailed, match="cuMemImportFromShareableHandle"):
        CudaMemory(0, driver).map([file.fileno()], [GRANULARITY])
    driver.assert_clean()


def test_arena_of_another_gpu_is_refused():
    driver = FakeDriver(devices=2)
    region = CudaMemory(1, driver).reserve(GRANULARITY)
    region.extend(GRANULARITY)
    fds = region.freeze()
    with pytest.raises(AttachFailed, match="arena 0 is not memory of GPU 0"):
        CudaMemory(0, driver).map(fds, [GRANULARITY])
    region.close()
    close_all(fds)
    driver.assert_clean()


def test_arena_announced_larger_than_it_is_is_refused():
    driver = FakeDriver()
    memory = CudaMemory(0, driver)
    region = memory.reserve(GRANULARITY)
    region.extend(GRANULARITY)
    fds = region.freeze()
    for sizes in ([2 * GRANULARITY], [GRANULARITY - 1], [0], [GRANULARITY, GRANULARITY]):
        with pytest.raises(AttachFailed):
            memory.map(fds, sizes)
    with pytest.raises(AttachFailed, match="outside"):
        region.bytes_at(GRANULARITY - 1, 2)
    region.close()
    close_all(fds)
    driver.assert_clean()


@pytest.mark.parametrize("missing", ["VIRTUAL_MEMORY_MANAGEMENT", "POSIX_FILE_DESCRIPTOR"])
def test_gpu_without_support_says_so(missing):
    with pytest.raises(DeviceUnavailable, match="does not support"):
        CudaMemory(0, FakeDriver(missing_attribute=missing))


@pytest.mark.parametrize(("devices", "ordinal"), [(0, 0), (1, 1), (2, -1)])
def test_absent_gpu_says_so(devices, ordinal):
    with pytest.raises(DeviceUnavailable):
        CudaMemory(ordinal, FakeDriver(devices=devices))


def test_uuid_in_the_form_of_nvidia_smi():
    assert device_uuid(0, FakeDriver()) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert device_uuid(0, FakeDriver(product=b"NVIDIA H200 MIG 1g.18gb")).startswith("MIG-00010203-")
    with pytest.raises(DeviceUnavailable, match="there is no GPU 3"):
        device_uuid(3, FakeDriver())


def test_device_is_found_by_its_uuid():
    driver = FakeDriver(devices=2)
    assert device_count(driver) == 2
    assert device_of_uuid("gpu-00010203-0405-0607-0809-0a0b0c0d0e0f", driver) == 0
    with pytest.raises(DeviceUnavailable, match="GPU-1 is not visible"):
        device_of_uuid("GPU-1", driver)
    with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        device_of_uuid("GPU-1", FakeDriver(devices=0))
