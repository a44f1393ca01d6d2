"""The server's process tree: take hold of it by pidfds, end it, and see it gone before anything else starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from weightcache.standby import fence
from weightcache.standby.messages import Process

_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.02


@dataclass(slots=True)
class Tree:
    """Processes below one root, held by pidfds, so that a reused process number is never signalled."""

    root: int
    held: dict[Process, int] = field(default_factory=dict)

    def update(self) -> None:
        """Take hold of everything that is below the root now; of nothing more, where no descriptor is left."""
        with contextlib.suppress(OSError):
            for process in _tree(self.root):
                if process not in self.held and (fd := _hold(process)) is not None:
                    self.held[process] = fd

    def kill(self, timeout: float) -> bool:
        """SIGKILL the whole tree and wait; False if some process is still there after ``timeout`` seconds."""
        self.strike()
        return self.wait(timeout)

    def strike(self) -> None:
        """SIGKILL the whole tree.

        Everything is stopped first, or a process that is still running could start another one behind our back.
        """
        seen = -1
        while seen != len(self.held):
            seen = len(self.held)
            self.update()
            self._send(signal.SIGSTOP)
        self._send(signal.SIGKILL)

    def wait(self, timeout: float, unless: int | None = None) -> bool:
        """Whether every held process ended within ``timeout`` seconds, and before ``unless`` was readable."""
        deadline, stop = time.monotonic() + timeout, False
        left, poll = set(self.held.values()), select.poll()
        for fd in (*left, *([] if unless is None else [unless])):
            poll.register(fd, select.POLLIN)
        while left and not stop:
            seconds = max(0.0, deadline - time.monotonic())
            for fd, _ in poll.poll(seconds * 1000):
                stop = stop or fd == unless
                left.discard(fd)
                poll.unregister(fd)
            stop = stop or not seconds
        return not left

    def close(self) -> None:
        """Let go."""
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()

    def _send(self, number: signal.Signals) -> None:
        for fd in self.held.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)


def below(root: int) -> list[int]:
    """``root`` and all its living descendants; ``root`` alone where no descriptor is left to look with."""
    try:
        return [root, *(process.pid for process in _descendants(root))]
    except OSError:
        return [root]


def _tree(root: int) -> list[Process]:
    """The same, but for a root that nobody sees any more."""
    started = fence.started(root)
    return [*([] if started is None else [Process(root, started)]), *_descendants(root)]


def _descendants(root: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The second field is the command in parentheses and may hold anything, also ")".
                fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    children.setdefault(int(fields[1]), []).append(Process(int(entry.name), int(fields[19])))
    found = list(children.get(root, ()))
    for process in found:
        found.extend(children.get(process.pid, ()))
    return found


def _hold(process: Process) -> int | None:
    """A pidfd of the process; None if it is gone, or nobody can tell."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Only now: whoever had the number a moment ago may be gone, and who has it by now is somebody else's.
    with contextlib.suppress(OSError):
        if fence.started(process.pid) == process.started:
            return fd
    os.close(fd)
    return None


def adopt_orphans() -> None:
    """From now on, processes below this one whose parent ends become children of this one (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> set[int]:
    """The children of a process, those that ended and nobody waited for included."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= set(map(int, (task / "children").read_text().split()))
    return found


class Strays:
    """What a server leaves behind: children of this process that were none before the server started."""

    def __init__(self) -> None:
        self._before = children(os.getpid())

    def reap(self, own: AbstractSet[int]) -> set[int]:
        """Wait for those that ended; the others. ``own`` are children that somebody else waits for."""
        left = set()
        for pid in children(os.getpid()) - self._before - own:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    left.add(pid)
        return left

    def end(self, own: AbstractSet[int], grace: float, timeout: float) -> bool:
        """Wait until none is left; after ``grace`` seconds they are killed. False if some outlive ``timeout``."""
        begun = time.monotonic()
        while left := self.reap(own):
            waited = time.monotonic() - begun
            if waited > grace + timeout:
                return False
            if waited > grace:
                for pid in left:  # nobody has waited for them, so that the number is still theirs
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        return True
