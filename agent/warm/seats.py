"""The parked children as the main process sees them, and how multiprocessing comes to use them.

multiprocessing starts a spawned process with one function, ``util.spawnv_passfds``: the command line names the pipe
from which the process reads its payload, and the descriptors that it inherits keep their numbers. A parked child that
gets these descriptors at these numbers is that process. Everything else (payload, sentinel, poll, join, kill) stays
multiprocessing's own, and real: the child is a child of this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import context, spawn, util
from typing import Any

from weightcache.engine import adapter_warm
from weightcache.errors import WeightcacheError
from weightcache.warm import binding, child, device, key, messages, process
from weightcache.warm.priority import Priority

TAKE_SECONDS = 5.0
COMMAND = re.compile(
    r"from multiprocessing\.spawn import spawn_main; spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)"
)
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(slots=True)
class Seat:
    """One parked child. ``environment`` is what it had while it imported."""

    kind: str
    process: subprocess.Popen[bytes]
    sock: socket.socket
    environment: dict[str, str]

    def kill(self) -> None:
        """End it."""
        self.sock.close()
        self.process.kill()
        self.process.wait()


def park(kind: str, changes: Mapping[str, str | None], facts: str, usual: Priority) -> Seat:
    """Start a child that imports what ``kind`` needs, with ``changes`` of the environment (see messages.Wait)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with theirs:
        changed = {**os.environ, **changes}
        environment = {name: value for name, value in changed.items() if value is not None}
        if environment.get(CUDA_DEVICES) != os.environ.get(CUDA_DEVICES):
            facts = device.find_out(environment)
        program = child.PROGRAM.format(fd=theirs.fileno(), parent=os.getpid())
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-c", program, "--multiprocessing-fork"]
        started = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    messages.send(ours, messages.Wait(kind, tuple(sys.path), tuple(sys.argv), usual, facts))
    return Seat(kind, started, ours, environment)


class Seats:
    """Hands parked children to multiprocessing until there are none left."""

    def __init__(self, seats: Sequence[Seat], tell: Callable[[str], None]) -> None:
        self._free = list(seats)
        self._tell = tell
        self._starting = threading.local()
        self._spawnv = util.spawnv_passfds
        self._popen = context.SpawnProcess._Popen

    def install(self) -> None:
        """From now on, processes are started here."""
        util.spawnv_passfds = self._start
        context.SpawnProcess._Popen = staticmethod(self._note)  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """As multiprocessing was; children that nobody needed end."""
        util.spawnv_passfds = self._spawnv
        context.SpawnProcess._Popen = staticmethod(self._popen)  # type: ignore[method-assign]
        for seat in self._free:
            seat.kill()
        self._free.clear()

    def _note(self, process_obj: Any) -> Any:
        self._starting.process = process_obj
        try:
            return self._popen(process_obj)
        finally:
            self._starting.process = None
            if not self._free:
                self.uninstall()

    def _start(self, path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        starting = getattr(self._starting, "process", None)
        match = COMMAND.search(" ".join(os.fsdecode(word) for word in args))
        if starting is not None and match:
            kind = adapter_warm.kind(starting._target, starting._args)
            seat = next((seat for seat in self._free if seat.kind == kind), None)
            if seat is not None:
                self._free.remove(seat)
                try:
                    self._hand(seat, os.fsdecode(path), passfds, int(match[1]), int(match[2]))
                except (WeightcacheError, OSError) as error:
                    self._tell(f"{kind}: not from a warm worker: {getattr(error, 'message', error)}")
                    seat.kill()
                else:
                    return self._released(seat)
        return int(self._spawnv(path, args, passfds))

    def _hand(self, seat: Seat, path: str, passfds: Sequence[int], tracker: int, pipe: int) -> None:
        numbers = sorted({0, 1, 2, *map(int, passfds)})
        if numbers[-1] >= process.LOWEST_FREE:
            raise WeightcacheError("the main process has too many files open")
        bound = binding.wanted(path, os.fsdecode(spawn.get_executable()), sys.executable)
        environment = dict(os.environ)
        names = [name for name in key.changed(seat.environment, environment) if name not in adapter_warm.READ_LATER]
        if names:
            raise WeightcacheError(f"its environment would differ in {key.listed(names)}")
        # It has looked after its files since the launch began, and waits.
        messages.expect(seat.sock, messages.Ready, TAKE_SECONDS)
        for limit in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(seat.process.pid, limit, resource.getrlimit(limit))
        messages.send(seat.sock, messages.Take(environment, tuple(numbers), tracker, pipe, bound), numbers)

    def _released(self, seat: Seat) -> int:
        seat.sock.close()
        pid = seat.process.pid
        seat.process.returncode = 0  # multiprocessing waits for it: subprocess must neither do so nor complain
        return pid


def await_ready(seats: Sequence[Seat], timeout: float) -> None:
    """Wait until all have imported. Raises AgentUnavailable with the reason of one that has not."""
    for seat in seats:
        messages.expect(seat.sock, messages.Ready, timeout)
