"""A parked child of the main process: imports, waits, and becomes the process that multiprocessing spawns.

Its command line is that of a spawned process but for the function's name, and it goes on in multiprocessing's own
``spawn_main``: same payload, same pipes at the same numbers, same exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing import spawn

from weightcache.engine import adapter_warm
from weightcache.errors import AgentUnavailable, ProtocolError
from weightcache.warm import binding, messages, priority, process

PROGRAM = "from weightcache.warm.child import main; main({fd}, {parent})"

UNUSED_SECONDS = 600.0
"""A child that the launch did not need ends by itself."""


def main(fd: int, parent: int) -> None:
    """``fd`` is the socket to the main process, whose number is ``parent``."""
    process.die_with_parent(parent)
    process.quiet_interrupt()
    began, began_with = time.time(), dict(os.environ)
    held = _hold_numbers()
    sock = process.moved_up(socket.socket(fileno=fd))
    try:
        wait, _ = messages.expect(sock, messages.Wait, 30)
        # As multiprocessing prepares a spawned process before it imports.
        sys.path[:], sys.argv[:] = wait.path, wait.argv
        multiprocessing.set_start_method("spawn", force=True)
        process.bring_in(adapter_warm.IMPORTS[wait.kind], wait.facts)
        messages.send(sock, messages.Ready(time.time() - began))
        messages.expect(sock, messages.Go, None)
        priority.restore(wait.usual)
        if changed := process.stale(began):
            raise AgentUnavailable(f"{changed} changed since it was parked")
        messages.send(sock, messages.Ready(time.time() - began))
        take, fds = messages.expect(sock, messages.Take, UNUSED_SECONDS, max_fds=64)
        if len(fds) != len(take.numbers):
            raise ProtocolError("not all descriptors came")
    except (AgentUnavailable, ProtocolError, OSError) as error:
        with contextlib.suppress(OSError):
            messages.send(sock, messages.Unfit(getattr(error, "message", str(error))))
        os._exit(1)
    _become(take, fds, held, sock, began_with)


def _hold_numbers() -> list[int]:
    """Keep the low numbers free: the launch's pipes have theirs, which are written in its payload."""
    null = os.open(os.devnull, os.O_RDWR)
    held = [null]
    while held[-1] < process.LOWEST_FREE - 1:
        held.append(os.dup(null))
    return held


def _become(
    take: messages.Take, fds: tuple[int, ...], held: list[int], sock: socket.socket, began_with: dict[str, str]
) -> None:
    for fd in held:
        os.close(fd)
    process.take_over(dict(zip(take.numbers, fds, strict=True)))
    process.adopt(began_with, take.environment)
    binding.apply(take.binding)
    process.usual_interrupt()
    process.handed_over()
    sock.close()
    # SGLang's processes arm this themselves; a spawned one has nothing of the kind before.
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    sys.argv[:] = ["-c", "--multiprocessing-fork"]
    spawn.spawn_main(tracker_fd=take.tracker, pipe_handle=take.pipe)
