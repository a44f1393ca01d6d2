"""A child process in a session of its own: its output line by line, its end, and the end of all its descendants."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 20
LONGEST_LINE = 2000
TERM_SECONDS = 5.0
KILL_SECONDS = 10.0


class Child:
    """A running child. ``exited`` is set once it has been reaped and nobody of its process group is left."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        """Start ``command``. Raises OSError."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = cast("IO[bytes]", self._process.stdout)
        self.pid = self._process.pid
        self.exited = asyncio.Event()
        self.lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._on_line = on_line
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor left: a child that cannot be watched must not run
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._output.close()
            raise
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._output.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def status(self) -> int | None:
        """Exit status, or minus the signal number; None while it runs."""
        return self._process.returncode

    def describe(self) -> str:
        """How it ended, in words, with its last lines."""
        status = self.status
        if status is None:
            how = "does not end"
        elif status < 0:
            how = f"ended with signal {-status} ({_signal_name(-status)})"
        else:
            how = f"ended with status {status}"
        return f"{how}{self.last_words()}"

    def last_words(self) -> str:
        """The last lines of output, ready to follow a sentence."""
        return ": " + " | ".join(list(self.lines)[-5:]) if self.lines else ""

    async def stop(self, grace: float = TERM_SECONDS) -> None:
        """End the whole process group: SIGTERM, ``grace`` seconds, SIGKILL."""
        for sign, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
            if self.exited.is_set():
                return
            self._signal(sign)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), seconds)

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sign)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Not reaped yet, so the number of the group cannot belong to anybody else: leftovers can be killed safely.
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        self._read()
        self._finish_output()
        self.exited.set()

    def _read(self) -> None:
        # Bounded, so that a child that floods its output cannot keep the event loop to itself.
        for _ in range(16):
            try:
                data = os.read(self._output.fileno(), 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output.fileno())
                return
            *whole, rest = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
            self._partial = rest[-LONGEST_LINE:]
            for line in whole:
                self._emit(line)

    def _finish_output(self) -> None:
        self._loop.remove_reader(self._output.fileno())
        self._emit(self._partial)
        self._output.close()

    def _emit(self, line: bytes) -> None:
        text = line[:LONGEST_LINE].decode("utf-8", "replace").rstrip()
        text = "".join(char if char.isprintable() else " " for char in text)
        if text.strip():
            self.lines.append(text)
            self._on_line(text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
