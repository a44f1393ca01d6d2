"""Signals as events with their origin, and what the server's process needs between fork and exec.

Ctrl-C reaches the server by itself (same foreground process group), so passing it on would interrupt it twice. Only
siginfo tells a terminal's signal from one that somebody sent to the launcher, and only signalfd(2) gives siginfo
without a second thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

FORWARDED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGWINCH,
    }
)
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Those that are to end a program."""
SI_KERNEL = 0x80
"""si_code of a signal that a terminal raised."""
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
_SIGINFO_SIZE = 128
_SFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class SignalEvents:
    """Blocks the forwarded signals for a while and makes them readable on a descriptor."""

    def __enter__(self) -> Self:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        mask = (ctypes.c_uint64 * 16)()  # sigset_t is 1024 bits
        mask[0] = sum(1 << (number - 1) for number in FORWARDED)
        self.fd: int = _libc.signalfd(-1, ctypes.byref(mask), _SFD_FLAGS)
        if self.fd < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            raise OSError(ctypes.get_errno(), "signalfd")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self.fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def fileno(self) -> int:
        """Readable when a signal is waiting."""
        return self.fd

    def take(self) -> list[tuple[signal.Signals, bool]]:
        """The waiting signals, and for each whether the server does not have it yet."""
        signals: list[tuple[signal.Signals, bool]] = []
        while True:
            try:
                data = os.read(self.fd, _SIGINFO_SIZE)
            except BlockingIOError:
                return signals
            number, _, code = struct.unpack_from("Iii", data)
            name = signal.Signals(number)
            signals.append((name, not (code == SI_KERNEL and name in _FROM_TERMINAL)))

    def child_setup(self) -> Callable[[], None]:
        """What the server's process calls between fork and exec: signals as before us, and it dies with the launcher.

        SIGKILL, because nobody is left who would end a server that does not listen; SGLang's own processes do the same
        with theirs.
        """
        before, parent = self._before, os.getpid()

        def setup() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the launcher died between fork and prctl
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        return setup


class Interrupted(BaseException):
    """A signal to end came while no server runs that would get it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Inside, a signal to end that nobody takes from SignalEvents raises Interrupted, so that things are put away."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_by(number: int) -> int:
    """End this process by ``number``, as the server ended, so that a shell sees the same; else its exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's core is the interesting one
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
