"""Parked processes import while an engine serves: they take the processor and the disk that nobody else wants.

Only what this process may undo is done: a nice value can be lowered again with CAP_SYS_NICE or a limit that allows it
(RLIMIT_NICE), SCHED_BATCH and the idle class of I/O can always be left again. All of them belong to threads, and
libraries start threads while they are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

NICE = 19
_CAP_SYS_NICE = 23
_IO_CALLS = {"x86_64": (252, 251), "aarch64": (31, 30)}
"""ioprio_get(2) and ioprio_set(2), for which libc has no functions."""
_IO_WHO_PROCESS = 1
_IO_IDLE = 3 << 13
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Priority:
    """What a process had before. ``nice`` None: not changed."""

    policy: int
    nice: int | None
    io: int | None


def lower() -> Priority:
    """Step back; threads that start from now on do too."""
    before = Priority(os.sched_getscheduler(0), _nice() if _may_return() else None, _io_get())
    if before.policy == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if before.nice is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if before.io is not None:
        _io_set(0, _IO_IDLE)
    return before


def restore(before: Priority) -> None:
    """Be as before, with all threads."""
    for thread in threads():
        with contextlib.suppress(OSError):
            if before.policy == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        with contextlib.suppress(OSError):
            if before.nice is not None:
                os.setpriority(os.PRIO_PROCESS, thread, before.nice)
        if before.io is not None:
            _io_set(thread, before.io)


def threads() -> list[int]:
    """This process's threads, by number."""
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _may_return() -> bool:
    """Whether a nice value that was raised can be lowered to what it is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20 - _nice():
        return True
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_NICE & 1)


def _io_get() -> int | None:
    calls = _IO_CALLS.get(platform.machine())
    value = _libc.syscall(ctypes.c_long(calls[0]), _IO_WHO_PROCESS, 0) if calls else -1
    return None if value < 0 else int(value)


def _io_set(thread: int, value: int) -> None:
    if calls := _IO_CALLS.get(platform.machine()):
        _libc.syscall(ctypes.c_long(calls[1]), _IO_WHO_PROCESS, thread, value)
