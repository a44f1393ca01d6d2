"""The service manager of a slot's launcher, at the other end of $NOTIFY_SOCKET (sd_notify(3)); none is none.

Its variables are taken out of the environment, so that no engine ever speaks for the launcher.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

LONGEST_STATUS = 1000


class Manager:
    """``patience``: the longest silence that it bears, in seconds; infinite without WatchdogSec."""

    def __init__(self, address: str = "", patience: float = math.inf) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.patience = patience
        self._ping_at = 0.0
        self._ready = False
        self._status = ""

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Manager:
        """The one that started this process."""
        address = environment.pop("NOTIFY_SOCKET", "")
        micros, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        watches = pid in ("", str(os.getpid())) and micros.isdigit() and int(micros) > 0
        return cls(address, int(micros) / 1e6 if watches else math.inf)

    def ready(self) -> None:
        """READY=1, once."""
        if not self._ready:
            self._ready = True
            self._send("READY=1")

    def status(self, text: str) -> None:
        """STATUS=: one line for ``systemctl status``, when it is another one than before."""
        if text != self._status:
            self._status = text
            line = "".join(char if " " <= char <= "~" else "?" for char in text)
            self._send(f"STATUS={line[:LONGEST_STATUS]}")

    def stopping(self) -> None:
        """STOPPING=1."""
        self._send("STOPPING=1")

    def ping(self, now: float, healthy: bool) -> float:
        """WATCHDOG=1 when it is time and ``healthy``; when to come again."""
        if math.isinf(self.patience):
            return math.inf
        if now >= self._ping_at:
            self._ping_at = now + self.patience / 2
            if healthy:
                self._send("WATCHDOG=1")
        return self._ping_at

    def bear(self, seconds: float | None) -> None:
        """Be silent for so long now, in which nobody can ping; None: no longer than ever again."""
        if not math.isinf(self.patience):
            self._send(f"WATCHDOG_USEC={int((self.patience if seconds is None else seconds) * 1e6)}\nWATCHDOG=1")
            self._ping_at = 0.0

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A manager that reads nothing must not hold up a take-over: what it misses, it hears again or kills for.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.sendto(text.encode(), self._address)
