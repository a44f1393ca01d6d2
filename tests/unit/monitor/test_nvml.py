"""NVML as drivers misbehave: every query that fails is a default, every driver that is missing one sentence."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.monitor.made import GPU
from weightcache.monitor.nvml import RETRY_SECONDS, Nvml, Reading
from weightcache.monitor.snapshot import Device, DeviceProcess

pynvml = pytest.importorskip("pynvml")

GB = 10**9
MIG = "MIG-11111111-2222-3333-4444-555555555555"
ERRORS = sorted(name for name in vars(pynvml) if name.startswith("NVML_ERROR_"))


class Driver:
    """A fake pynvml. ``fails`` names functions and the error that they give; ``calls`` counts."""

    def __init__(self) -> None:
        self.fails: dict[str, Any] = {}
        self.calls: dict[str, int] = {}
        self.memory: Any = SimpleNamespace(total=100 * GB, used=60 * GB, free=40 * GB)
        self.compute: Any = []
        self.graphics: Any = []
        self.uuids = {GPU, MIG}
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return getattr(pynvml, name)
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if (failure := self.fails.get(name)) is not None:
                raise pynvml.NVMLError(failure) if isinstance(failure, int) else failure
            return self._answer(name, *arguments)

        return call

    def _answer(self, name: str, *arguments: Any) -> Any:
        match name:
            case "nvmlInit":
                self.begun += 1
            case "nvmlShutdown":
                self.begun -= 1
            case "nvmlDeviceGetHandleByUUID":
                if arguments[0] not in self.uuids:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
                return f"handle of {arguments[0]}"
        return {
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetIndex": 3,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetComputeRunningProcesses": self.compute,
            "nvmlDeviceGetGraphicsRunningProcesses": self.graphics,
        }.get(name)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nvml(driver: Driver, clock: Clock) -> Nvml:
    return Nvml(lambda: driver, clock)


def named(pid: int) -> str:
    return f"process {pid}"


def process(pid: Any, used: Any) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_a_device(nvml: Nvml, driver: Driver) -> None:
    driver.compute = [process(10, 5 * GB), process(11, 20 * GB)]
    processes = (DeviceProcess(11, "process 11", 20 * GB), DeviceProcess(10, "process 10", 5 * GB))
    device = Device(GPU, 3, "NVIDIA H200", 100 * GB, 60 * GB, 40 * GB, processes)
    assert nvml.read([GPU], named) == Reading("580.65.06", "", (device,))
    nvml.read([GPU], named)
    assert (driver.calls["nvmlInit"], driver.calls["nvmlDeviceGetHandleByUUID"]) == (1, 1)


def test_what_the_driver_keeps_for_itself_is_used(nvml: Nvml, driver: Driver) -> None:
    driver.memory = SimpleNamespace(total=100 * GB, used=50 * GB, free=40 * GB)
    assert nvml.read([GPU], named).devices[0].used == 60 * GB


def test_nothing_is_begun_without_a_gpu(nvml: Nvml, driver: Driver) -> None:
    assert nvml.read([], named) == Reading()
    assert driver.calls == {}


def test_a_slice_has_no_index(nvml: Nvml) -> None:
    found = nvml.read([MIG, GPU], named)
    assert [(device.uuid, device.index) for device in found.devices] == [(MIG, -1), (GPU, 3)]


def test_a_process_of_both_kinds_is_one(nvml: Nvml, driver: Driver) -> None:
    driver.compute = [process(10, 5 * GB), process(12, None)]
    driver.graphics = [process(10, 5 * GB), process(12, 7), process(13, None)]
    found = nvml.read([GPU], named).devices[0].processes
    assert [(p.pid, p.bytes) for p in found] == [(10, 5 * GB), (12, 7), (13, None)]


@pytest.mark.parametrize("used", [None, 2**64 - 1, -1, "[N/A]", 1.5, ctypes.c_ulonglong(-1).value])
def test_what_is_not_available_is_none(nvml: Nvml, driver: Driver, used: Any) -> None:
    driver.compute = [process(10, used)]
    assert nvml.read([GPU], named).devices[0].processes == (DeviceProcess(10, "process 10", None),)


@pytest.mark.parametrize("odd", [[process(None, 1)], [process(0, 1)], [object()], None, ()])
def test_odd_lists_of_processes(nvml: Nvml, driver: Driver, odd: Any) -> None:
    driver.compute = odd
    assert nvml.read([GPU], named).devices[0].processes == ()


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    "query",
    [
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetHandleByUUID",
        "nvmlInit",
    ],
)
def test_whatever_fails_nothing_raises(nvml: Nvml, driver: Driver, query: str, name: str) -> None:
    driver.fails[query] = getattr(pynvml, name)
    found = nvml.read([GPU], named)
    assert (not found.devices) == bool(found.problem)
    if found.devices:
        assert query not in ("nvmlInit", "nvmlDeviceGetHandleByUUID")
    if query in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        assert found.problem
        assert "\n" not in found.problem


@pytest.mark.parametrize(
    "odd", [OSError("libnvidia-ml.so.1: bad"), AttributeError("x"), RuntimeError("x"), MemoryError()]
)
def test_bindings_that_break(nvml: Nvml, driver: Driver, odd: Exception) -> None:
    for query in ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetName"):
        driver.fails = {query: odd}
        nvml.read([GPU], named)


def test_queries_that_do_not_exist(driver: Driver, clock: Clock) -> None:
    bare = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid)
    found = Nvml(lambda: bare, clock).read([GPU], named)
    assert found == Reading("", "", (Device(GPU, -1, "", 0, 0, 0, ()),))


def test_bytes_from_older_bindings(nvml: Nvml, driver: Driver) -> None:
    driver.memory = SimpleNamespace(total="x", free=None)
    driver.__dict__["nvmlDeviceGetName"] = lambda _: b"Tesla \xff"
    [device] = nvml.read([GPU], named).devices
    assert (device.name, device.total, device.used) == ("Tesla \N{REPLACEMENT CHARACTER}", 0, 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LIBRARY_NOT_FOUND", "library libnvidia-ml.so.1 was not found"),
        ("DRIVER_NOT_LOADED", "is not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "not of the version of the loaded kernel module"),
        ("NO_PERMISSION", "may not open /dev/nvidia"),
        ("UNKNOWN", "NVML says 'Unknown Error'"),
    ],
)
def test_a_driver_that_cannot_be_used(nvml: Nvml, driver: Driver, error: str, words: str) -> None:
    driver.fails["nvmlInit"] = getattr(pynvml, f"NVML_ERROR_{error}")
    found = nvml.read([GPU], named)
    assert (found.driver, found.devices) == ("", ())
    assert words in found.problem


def test_the_package_may_be_missing(clock: Clock) -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    assert "nvidia-ml-py is not installed" in Nvml(load, clock).read([GPU], named).problem


def test_a_driver_that_comes_is_noticed_after_a_pause(nvml: Nvml, driver: Driver, clock: Clock) -> None:
    driver.fails["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    first = nvml.read([GPU], named)
    del driver.fails["nvmlInit"]
    assert nvml.read([GPU], named) == first
    clock.now += RETRY_SECONDS
    found = nvml.read([GPU], named)
    assert (found.problem, len(found.devices)) == ("", 1)
    assert driver.calls["nvmlInit"] == 2


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "UNINITIALIZED"])
def test_a_lost_gpu_is_begun_again_with_after_a_pause(nvml: Nvml, driver: Driver, clock: Clock, error: str) -> None:
    nvml.read([GPU, MIG], named)
    driver.fails["nvmlDeviceGetMemoryInfo"] = getattr(pynvml, f"NVML_ERROR_{error}")
    found = nvml.read([GPU, MIG], named)
    assert found.devices == ()
    assert GPU in found.problem
    del driver.fails["nvmlDeviceGetMemoryInfo"]
    driver.fails["nvmlShutdown"] = pynvml.NVML_ERROR_UNINITIALIZED
    assert len(nvml.read([GPU, MIG], named).devices) == 2  # nothing keeps it from being asked meanwhile
    assert driver.calls["nvmlInit"] == 1
    clock.now += RETRY_SECONDS
    assert nvml.read([GPU, MIG], named).problem == ""
    assert driver.calls["nvmlInit"] == 2
    clock.now += 10 * RETRY_SECONDS
    nvml.read([GPU, MIG], named)
    assert driver.calls["nvmlInit"] == 2


def test_one_gpu_that_is_not_there_hides_no_other(nvml: Nvml) -> None:
    found = nvml.read(["GPU-none", GPU], named)
    assert [device.uuid for device in found.devices] == [GPU]
    assert found.problem == "there is no GPU GPU-none on this host (nvidia-smi -L lists them)"


def test_the_real_package_without_a_driver() -> None:
    """Where there is one, it finds no such GPU."""
    found = Nvml().read(["GPU-00000000-0000-0000-0000-000000000000"], named)
    assert found.devices == ()
    assert found.problem
