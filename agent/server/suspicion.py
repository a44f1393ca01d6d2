"""Memory that went bad: persistence must not hand the same broken page to one engine after the other.

An engine that dies of a device fault or a fatal signal soon after it attached makes its set suspect: a throw-away child
recomputes the digests, and nobody gets the set before that. Twice in a row, with digests that are right, means that
something else kills the engines; then nothing more is given out until an operator has looked.

A fault is told by the engine itself (SGLang ends its processes with SIGKILL whatever happened). A fatal signal is told
by the kernel, where it can be asked about processes that are no children: ioctl_pidfd(2) PIDFD_GET_INFO with
PIDFD_INFO_EXIT, Linux 6.15.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import struct
import time
from typing import TYPE_CHECKING

from weightcache.errors import DamagedSet, WeightcacheError
from weightcache.server import verify
from weightcache.server.journal import event

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.leases import Lease
    from weightcache.server.sets import ResidentSet

log = logging.getLogger("weightcache")

SOON_SECONDS = 600.0
"""An engine that lived longer with a set has shown that it can be read."""

REAPED_SECONDS = 1.0
"""How long the parent of a dead engine may take to reap it: only then does the kernel tell how it ended."""

FATAL = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_PIDFD_INFO = struct.Struct("=QQ" + 11 * "I" + "i")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


async def judge(agent: Agent, lease: Lease, words: str, pidfd: int | None) -> None:
    """See how an engine ended whose lease is over; ``words`` is what it said itself."""
    resident = agent.sets.get(lease.set_id)
    if resident is None or agent.leaving:
        return
    if time.monotonic() - lease.began > SOON_SECONDS:
        resident.deaths = 0
        return
    if not words and pidfd is not None and (number := await _fatal_signal(pidfd)):
        words = f"ended with {signal.Signals(number).name}"
    if not words:
        if time.monotonic() - lease.began > REAPED_SECONDS:
            resident.deaths = 0
        return
    # Engines that shared the set when an earlier one died may have died of the same event.
    if lease.began > resident.suspected_at:
        resident.deaths += 1
    resident.suspected_at = time.monotonic()
    reason = f"pid {lease.status.pid}, attached for {time.monotonic() - lease.began:.0f} s, {words}"
    log.warning("set %s is suspect: %s", resident.id, reason, extra=event("suspected", set=resident.id, reason=reason))
    agent.spawn(_examine(agent, resident, reason), optional=True)


async def _examine(agent: Agent, resident: ResidentSet, reason: str) -> None:
    resident.doubts.append(reason)
    agent.touch()
    try:
        async with agent.verifying:
            await verify.check(agent, resident)
        if resident.deaths >= 2:
            agent.condemn(
                resident,
                f"{resident.deaths} engines in a row died soon after they attached to set {resident.id}, although its "
                f"bytes are as published; the last: {reason}",
            )
    except DamagedSet:
        verify.heal(agent, resident)
    except WeightcacheError as error:
        log.warning("set %s cannot be examined: %s", resident.id, error.message)
    finally:
        resident.doubts.remove(reason)
        agent.touch()


async def _fatal_signal(pidfd: int) -> int:
    """The signal that ended a process, if it is one that points at memory; 0 for any other end, or none to be had."""
    deadline = time.monotonic() + REAPED_SECONDS
    while time.monotonic() < deadline:
        code = _exit_code(pidfd)
        if code is not None:
            return os.WTERMSIG(code) if os.WIFSIGNALED(code) and os.WTERMSIG(code) in FATAL else 0
        await asyncio.sleep(0.05)
    return 0


def _exit_code(pidfd: int) -> int | None:
    """The wait status of a process that was reaped; None before, and where the kernel does not tell."""
    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, *_, code = _PIDFD_INFO.unpack(request)
    return int(code) if mask & _PIDFD_INFO_EXIT else None
