"""An orderly end: a signal ends a wait, and so every context manager around it runs, however the comparison is ended.

Nothing else is interrupted. An exception between the start of a process and the ``try`` that ends it, or within what
ends it, would leave just what this module is for: processes that hold a device's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_asked = 0
_waiting = False


class Ended(KeyboardInterrupt):
    """A signal asked for the end; ``status`` is the exit status by convention."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """The first of SIGNALS raises Ended in ``wait`` or at the end of this block; further ones change nothing.

    After the block there is only an exit status to be returned, and none of them changes that.
    """
    global _asked, _waiting
    _asked, _waiting = 0, False
    # Whoever ignores a signal goes on doing so: nohup(1).
    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, _take)
    # What was started for a command that was killed would hold the device for minutes, for nobody.
    with_parent(signal.SIGTERM)
    try:
        yield
        _check()
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def wait() -> Iterator[None]:
    """A wait, which a signal ends. Nothing may be acquired in this block that leaving it does not give back."""
    global _waiting
    _waiting = True
    try:
        _check()  # after _waiting is set: a signal comes before this, or is raised by its handler
        yield
    finally:
        _waiting = False


def with_parent(number: int) -> None:
    """Have this process get a signal when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def status(child: int, seconds: float = 0.0) -> int | None:
    """How a child ended, as subprocess says it; None if it does not within ``seconds``.

    Unlike ``Popen.poll`` and ``wait``, this leaves its number to it: nobody else gets it before those.
    """
    deadline = time.monotonic() + seconds
    while (found := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def kill_group(child: int) -> None:
    """SIGKILL whoever is in a child's process group; nobody once it was waited for: the number may be another's."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
        status(child)
        os.killpg(child, signal.SIGKILL)


def _take(number: int, _frame: FrameType | None) -> None:
    global _asked
    first, _asked = not _asked, _asked or number
    if first and _waiting:
        raise Ended(number)


def _check() -> None:
    if _asked:
        raise Ended(_asked)
