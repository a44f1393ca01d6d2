"""What SGLang asks about GPUs while it is imported, answered without CUDA in the asking process.

Importing SGLang asks torch (and Triton) for the device's compute capability and the like, which makes a CUDA context:
hundreds of megabytes of GPU memory in every parked process. These are questions about constants, so that a helper
(``python -m weightcache.warm.device``) finds them out first, from the driver's cuInit and attributes, which need no
context, and ends. Whoever asks during ``answering`` gets those facts, and the real functions answer again afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from weightcache import records
from weightcache.errors import DeviceUnavailable

HELPER_SECONDS = 30.0
_NAME_BYTES = 256
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "warp_size": 10,
    "max_threads_per_block": 1,
    "max_threads_per_multi_processor": 39,
    "regs_per_block": 12,
    "regs_per_multiprocessor": 82,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "L2_cache_size": 38,
    "is_integrated": 18,
    "is_multi_gpu_board": 84,
    "clock_rate": 13,
    "memory_clock_rate": 36,
    "memory_bus_width": 37,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "pci_domain_id": 50,
}
"""Names in torch's device properties (but for regs_per_block), and CUdevice_attribute in cuda.h."""


@dataclass(frozen=True, slots=True)
class Device:
    """One visible GPU. ``attributes`` by torch's names (_ATTRIBUTES), ``total_memory`` in bytes."""

    name: str
    total_memory: int
    attributes: dict[str, int]

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.attributes["major"], self.attributes["minor"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The GPUs that CUDA would show to this process, in CUDA's order; none without a driver."""

    devices: tuple[Device, ...] = ()


def find_out(environment: Mapping[str, str]) -> str:
    """Run the helper under ``environment``; its answer as text. Raises DeviceUnavailable."""
    command = [sys.executable, "-m", "weightcache.warm.device"]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HELPER_SECONDS,
            check=True,
        )
        read(done.stdout.decode())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceUnavailable(f"facts about the GPUs could not be found out ({type(error).__name__})") from None
    return done.stdout.decode()


def read(text: str) -> Facts:
    """Decode the helper's answer. Raises ValueError."""
    facts = records.from_plain(Facts, json.loads(text)) if text else Facts()
    if any(set(device.attributes) != set(_ATTRIBUTES) for device in facts.devices):
        raise ValueError("attributes are missing")
    return facts


def ask_driver() -> Facts:
    """Load the driver and ask it; only in a process that ends soon, since cuInit reads CUDA's variables once."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Facts()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return Facts()
    return Facts(tuple(_ask(cuda, index) for index in range(count.value)))


def _ask(cuda: Any, index: int) -> Device:
    handle, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    failed = cuda.cuDeviceGet(ctypes.byref(handle), index)
    failed = failed or cuda.cuDeviceGetName(name, _NAME_BYTES, handle)
    failed = failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    attributes = {}
    for known, attribute in _ATTRIBUTES.items():
        failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
        attributes[known] = number.value
    if failed:
        raise DeviceUnavailable(f"the driver does not describe GPU {index} (error {failed})")
    return Device(name.value.decode(errors="replace"), size.value, attributes)


def has_context() -> bool:
    """Whether this process has a context of CUDA's runtime on any GPU; asking makes none.

    True also where that cannot be found out. cuInit and questions about devices make no context and take no GPU memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    count, handle, flags, active = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return True
    for index in range(count.value):
        failed = cuda.cuDeviceGet(ctypes.byref(handle), index)
        failed = failed or cuda.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(active))
        if failed or active.value:
            return True
    return False


@contextmanager
def answering(facts: Facts, cuda: Any, triton_driver: Any = None) -> Iterator[None]:
    """Answer ``cuda``'s (the module torch.cuda) questions about devices inside the block.

    ``triton_driver`` is triton.runtime.driver, where there is one. A module that keeps a function by its name keeps one
    that asks the real one afterwards. Nothing is done without a device.
    """
    if not facts.devices:
        yield
        return
    state = SimpleNamespace(on=True)
    originals: dict[str, Any] = {}
    for name, answer in _answers(facts).items():
        originals[name] = getattr(cuda, name)
        setattr(cuda, name, _until(state, answer, originals[name]))
    if triton_driver is not None:
        triton_driver.set_active(_TritonDriver(facts))
    try:
        yield
    finally:
        state.on = False
        for name, original in originals.items():
            setattr(cuda, name, original)
        if triton_driver is not None:
            _forget_active(triton_driver)


def _forget_active(holder: Any) -> None:
    """The next to ask makes the real driver. Triton's own reset_active makes it at once in newer releases."""
    if hasattr(holder, "_active"):
        holder._active = None
    else:
        holder.reset_active()


def _until(state: SimpleNamespace, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        return (answer if state.on else original)(*args, **kwargs)

    return asked


def _answers(facts: Facts) -> dict[str, Callable[..., Any]]:
    def of(device: Any = None) -> Device:
        if isinstance(device, str):
            device = int(device.partition(":")[2] or 0)
        index = device if isinstance(device, int) else getattr(device, "index", None)
        return facts.devices[index or 0]

    return {
        "is_available": lambda: True,
        "device_count": lambda: len(facts.devices),
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: of(device).name,
        "get_device_capability": lambda device=None: of(device).capability,
        "get_device_properties": lambda device=None: _properties(of(device)),
    }


def _properties(device: Device) -> SimpleNamespace:
    return SimpleNamespace(name=device.name, total_memory=device.total_memory, **device.attributes)


class _TritonDriver:
    """As much of Triton's CUDA driver as has no context: triton/backends/nvidia/driver.py."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self._facts.devices[device].capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._facts.devices[0].capability
        return GPUTarget("cuda", major * 10 + minor, self._facts.devices[0].attributes["warp_size"])

    def _properties(self, device: int) -> dict[str, int]:
        found = self._facts.devices[device].attributes
        return {
            "max_shared_mem": found["shared_memory_per_block_optin"],
            "max_num_regs": found["regs_per_block"],
            "multiprocessor_count": found["multi_processor_count"],
            "warpSize": found["warp_size"],
            "sm_clock_rate": found["clock_rate"],
            "mem_clock_rate": found["memory_clock_rate"],
            "mem_bus_width": found["memory_bus_width"],
        }


def triton_driver() -> Any:
    """Triton's holder of the active driver, or None where there is no Triton."""
    with contextlib.suppress(ImportError, AttributeError):
        from triton.runtime import driver

        if hasattr(driver, "set_active") and hasattr(driver, "reset_active"):
            return driver
    return None


def main() -> None:
    """Print the facts as JSON."""
    sys.stdout.write(json.dumps(records.to_plain(ask_driver())))


if __name__ == "__main__":
    main()
