"""A launch's processes, as their tiny parent sees them: one process group that ends as a whole, and why it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcache.errors import LoadFailed
from weightcache.loader import reasons
from weightcache.loader.reasons import Reason

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS_SECONDS = 1.0
REAP_SECONDS = 15.0
"""How long killed processes may take to be gone: a driver frees memory at its own pace."""

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """End with whoever started this process: a load for an agent that was killed would hold the device for nobody."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Family:
    """One child and all that it starts. Leaving the block kills and reaps every one of them; so do SIGTERM and SIGINT.

    They are a process group of their own, since this process has to outlive them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, alone: bool) -> None:
        """Start ``command``; ``alone``: its only process has no others whose failure could be the cause of its own."""
        self._folder = tempfile.TemporaryDirectory(prefix="weightcache-")
        self._reason = Path(self._folder.name) / "reason"
        self._signal = 0
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        end_with_parent()
        # What the child leaves behind becomes this process's own, and is reaped here.
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()

        def tie_to_parent() -> None:
            # Ignored signals survive exec, and SGLang's own processes rely on SIGQUIT's default.
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        wait = {} if alone else {reasons.WAIT_VARIABLE: f"{reasons.CAUSE_SECONDS:g}"}
        self._child = subprocess.Popen(
            command,
            env={**environment, reasons.VARIABLE: str(self._reason)} | wait,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=tie_to_parent,
        )
        self.pidfd = os.pidfd_open(self._child.pid)
        """Readable once the child has ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)

    def _told(self, number: int, _: object) -> None:
        self._signal = number
        self._kill()

    def _kill(self) -> None:
        # SIGKILL, because SGLang would first end its own children with patience; nothing that it holds outlives it.
        if self._child.returncode is None:  # not reaped, so the number cannot be another group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def told(self, reason: str) -> None:
        """Pass on why the launch is over; ranks that notice it themselves have a moment to tell their agents."""
        reasons.leave(Reason(LoadFailed.code, reason, own=True), self._reason)
        select.select([self.pidfd], [], [], LAST_WORDS_SECONDS)

    def end(self) -> Reason | None:
        """Wait for the child, end what it left; returns why it failed, or None when all was published."""
        if self._child.returncode is None:
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
            self._kill()
            self._child.wait()
            self._reap()
        status = self._child.returncode
        if status == 0:
            return None
        if self._signal:
            return Reason(LoadFailed.code, f"its loader was ended by {signal.Signals(self._signal).name}", own=True)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        unknown = Reason(LoadFailed.code, f"SGLang ended with {how} before the weights were published", own=status < 0)
        return reasons.found(self._reason) or unknown

    def _reap(self) -> None:
        deadline = time.monotonic() + REAP_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._kill()
        self.end()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.close(self.pidfd)
        self._folder.cleanup()
