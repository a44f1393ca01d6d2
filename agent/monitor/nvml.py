"""GPUs as the NVIDIA driver sees them: memory, name and processes. What a driver cannot say is a default, no exception.

NVML's own memory total is all there is; what is not free is used, by whomever (the driver's reserve included).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weightcache.monitor.snapshot import Device, DeviceProcess

RETRY_SECONDS = 5.0
"""Between two attempts to begin (again) with a driver that failed."""

_NOTHING_KNOWN = "so that nothing is known of this host's GPUs"
_BEGINNING = {
    "LIBRARY_NOT_FOUND": f"the NVIDIA driver's library libnvidia-ml.so.1 was not found, {_NOTHING_KNOWN}",
    "DRIVER_NOT_LOADED": f"the NVIDIA driver is not loaded, {_NOTHING_KNOWN}",
    "LIB_RM_VERSION_MISMATCH": (
        "the NVIDIA driver's libraries are not of the version of the loaded kernel module (an upgrade without a "
        f"reboot?), {_NOTHING_KNOWN}"
    ),
    "NO_PERMISSION": f"this user may not open /dev/nvidia*, {_NOTHING_KNOWN}",
}
_LOOKING = {
    "NOT_FOUND": "there is no GPU {uuid} on this host (nvidia-smi -L lists them)",
    "INVALID_ARGUMENT": "{uuid} is no UUID of a GPU (nvidia-smi -L lists them)",
    "GPU_IS_LOST": "the driver lost the GPU {uuid} (the kernel's log says why; it needs a reset or a reboot)",
    "RESET_REQUIRED": "the GPU {uuid} needs a reset",
    "NO_PERMISSION": "this user may not look at the GPU {uuid}",
}
_BEGIN_AGAIN = ("UNINITIALIZED", "GPU_IS_LOST", "RESET_REQUIRED", "DRIVER_NOT_LOADED", "UNKNOWN")
"""What does not get better for this process until it begins again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Devices that could be found, the driver's version, and one sentence on what is missing (or empty)."""

    driver: str = ""
    problem: str = ""
    devices: tuple[Device, ...] = ()


class Nvml:
    """The driver, asked through pynvml. Nothing is loaded before the first GPU is asked for; nothing raises.

    Calls may hang with the driver: they belong into a thread that nobody waits for.
    """

    def __init__(
        self,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._clock = clock
        self._library: Any = None
        self._begun = False
        self._again_at: float | None = None
        self._problem = ""
        self._handles: dict[str, Any] = {}
        self._driver = ""

    def read(self, uuids: Iterable[str], command: Callable[[int], str]) -> Reading:
        """The devices with these UUIDs (GPU-... or MIG-...), in this order. ``command`` names a process."""
        wanted = list(uuids)
        if not wanted or not self._ready():
            return Reading("", self._problem if wanted else "")
        devices, problems = [], []
        for uuid in wanted:
            try:
                devices.append(self._device(uuid, self._handle(uuid), command))
            except Exception as error:  # noqa: BLE001 - whatever a driver, or its binding, comes up with
                problems.append(self._looked(uuid, error))
        return Reading(self._driver, problems[0] if problems else "", tuple(devices))

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        if self._again_at is not None:
            if self._clock() < self._again_at:
                return self._begun
            self._end()
        if not self._begun:
            self._begin()
        return self._begun

    def _begin(self) -> None:
        try:
            self._library = self._load()
            self._library.nvmlInit()
        except ImportError:
            self._problem = f"the package nvidia-ml-py is not installed, {_NOTHING_KNOWN}"
        except Exception as error:  # noqa: BLE001 - as above
            self._problem = _BEGINNING.get(self._name(error)) or f"NVML says {str(error)!r}, {_NOTHING_KNOWN}"
        else:
            self._begun, self._problem = True, ""
            self._driver = _text(self._ask("nvmlSystemGetDriverVersion"))
            return
        self._again_at = self._clock() + RETRY_SECONDS

    def _end(self) -> None:
        if self._begun:
            self._ask("nvmlShutdown")
        self._begun, self._again_at = False, None
        self._handles.clear()

    def _looked(self, uuid: str, error: Exception) -> str:
        """The sentence for a device that cannot be had."""
        name = self._name(error)
        self._handles.pop(uuid, None)
        if name in _BEGIN_AGAIN and self._again_at is None:
            self._again_at = self._clock() + RETRY_SECONDS
        return _LOOKING.get(name, f"NVML says {str(error)!r} of the GPU {{uuid}}").replace("{uuid}", uuid)

    # -- asking --------------------------------------------------------------------------------------------------------

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._library.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _device(self, uuid: str, handle: Any, command: Callable[[int], str]) -> Device:
        total = free = 0
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            total, free = _count(memory.total) or 0, _count(memory.free) or 0
        except Exception as error:
            if self._name(error) in (*_BEGIN_AGAIN, "NOT_FOUND"):
                raise
        # A slice's number says nothing of where it is.
        index = -1 if uuid.startswith("MIG-") else self._ask("nvmlDeviceGetIndex", handle)
        return Device(
            uuid=uuid,
            index=index if isinstance(index, int) else -1,
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            total=total,
            used=max(total - free, 0),
            free=min(free, total),
            processes=self._processes(handle, command),
        )

    def _processes(self, handle: Any, command: Callable[[int], str]) -> tuple[DeviceProcess, ...]:
        found: dict[int, int | None] = {}
        for query in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._ask(query, handle) or ():
                pid, own = getattr(process, "pid", None), _count(getattr(process, "usedGpuMemory", None))
                if isinstance(pid, int) and pid > 0:
                    # A process of both kinds is listed twice, each time with all its memory.
                    found[pid] = max((size for size in (found.get(pid), own) if size is not None), default=None)
        return tuple(
            DeviceProcess(pid, command(pid), own)
            for pid, own in sorted(found.items(), key=lambda item: (-(item[1] or 0), item[0]))
        )

    def _ask(self, query: str, *arguments: Any) -> Any:
        """The answer, or None: not supported by this GPU, not known to this driver, not allowed for this user."""
        try:
            return getattr(self._library, query)(*arguments)
        except Exception:  # noqa: BLE001 - as above
            return None

    def _name(self, error: Exception) -> str:
        """``GPU_IS_LOST``; empty for what is no error of NVML."""
        value = getattr(error, "value", None)
        names = [*_BEGINNING, *_LOOKING, *_BEGIN_AGAIN]
        return next((n for n in names if value is not None and self._constant(n) == value), "")

    def _constant(self, name: str) -> Any:
        return getattr(self._library, f"NVML_ERROR_{name}", None)


def _text(value: Any) -> str:
    if isinstance(value, bytes):  # older bindings
        value = value.decode(errors="replace")
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    """A number of bytes; None for "not available", which is all ones where the binding does not say None."""
    return value if type(value) is int and 0 <= value < 2**63 else None
