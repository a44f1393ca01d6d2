"""Wait until processes are gone, told apart from later ones with the same number by their start time.

A pidfd says so (pidfd_open(2)) when a process has ended with all its threads, reaped or not: by then the kernel has
closed its files, and with them the driver's, so that nothing of it runs on a GPU any more.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from weightcache.errors import WeightcacheError
from weightcache.standby.messages import Process

LONGEST_POLL = 3600.0
"""Seconds; poll(2) takes no more than an int of milliseconds."""


def started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (field 22 of /proc/PID/stat); None: none is to be seen.

    Raises OSError.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, and may hold ")" and spaces.
    return int(text.rpartition(b")")[2].split()[19])


def identify(pid: int) -> Process:
    """The process that has this number now. Raises WeightcacheError if there is none."""
    when = started(pid)
    if when is None:
        raise WeightcacheError(f"process {pid} is not there any more")
    return Process(pid, when)


def lives(process: Process) -> bool:
    """Whether it is there and has not ended."""
    return bool(wait((process,), 0.0))


def living(processes: Iterable[Process]) -> tuple[Process, ...]:
    """Those that are there still, and those of which it cannot be told."""
    return tuple(process for process in dict.fromkeys(processes) if _may_live(process))


def _may_live(process: Process) -> bool:
    try:
        return lives(process)
    except (OSError, OverflowError):
        return True


def wait(processes: Sequence[Process], seconds: float) -> tuple[Process, ...]:
    """Wait until all ``processes`` are gone; those that still live after ``seconds``. Raises OSError.

    Who cannot be told from another one, because /proc hides it, counts as living until that one ends.
    """
    deadline = time.monotonic() + seconds
    held: dict[int, Process] = {}
    poll = select.poll()
    try:
        for process in dict.fromkeys(processes):
            if (fd := _open(process)) is not None:
                held[fd] = process
                poll.register(fd, select.POLLIN)
        while held:
            left = max(0.0, deadline - time.monotonic())
            for fd, _ in poll.poll(min(left, LONGEST_POLL) * 1000):
                poll.unregister(fd)
                del held[fd]
                os.close(fd)
            if not left:
                break
        return tuple(held.values())
    finally:
        for fd in held:
            os.close(fd)


def _open(process: Process) -> int | None:
    """A pidfd of the process; None if it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        # EINVAL, and ENOENT in later kernels: the number is a thread's by now.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        raise
    try:
        # Only now: what is seen after the pidfd was opened is its process, or that one has ended and the pidfd says so.
        if started(process.pid) in (process.started, None):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
