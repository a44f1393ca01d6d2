"""The launcher's private socket, on which the plugin in SGLang's processes reports.

A directory of mode 0700 holds it; a report is one packet on a connection of its own, and only this user may send one.
Nothing here blocks: the supervisor's selector says when there is something to read.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weightcache import transport
from weightcache.engine import directive
from weightcache.errors import ProtocolError, WeightcacheError
from weightcache.launch.door import Door

if TYPE_CHECKING:
    from types import TracebackType

MAX_SOCKET_PATH = 107
MAX_SENDERS = 256
"""Connections that have not sent their report yet; a launch has a few processes a GPU."""


class Receiver:
    """A listening report socket; use it as a context manager.

    ``listener`` is the HTTP port, for the server that asks for it; it stays the caller's.
    """

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._http = listener
        self.directory = _private_directory()
        self.path = self.directory / "report"
        self._senders: dict[int, socket.socket] = {}
        try:
            self._door = Door(self.path)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def fileno(self) -> int:
        """Readable when a report or a connection is waiting."""
        return self._door.fileno()

    def due(self) -> float:
        """When to call ``take`` although nothing is readable, on CLOCK_MONOTONIC."""
        return self._door.due()

    def take(self) -> list[directive.Report]:
        """All reports that are complete now."""
        reports: list[directive.Report] = []
        progress = True
        while progress:
            progress = False
            for key in self._door.ready():
                progress = True
                if key.fileobj is self._door.listener:
                    self._accept()
                    continue
                sender = self._senders.pop(key.fd)
                self._door.selector.unregister(sender)
                with contextlib.closing(sender):
                    reports.extend(self._heard(sender))
        return reports

    def _accept(self) -> None:
        if (sender := self._door.accept()) is None:
            return
        _, uid, _ = transport.peer_credentials(sender)
        if uid != os.geteuid() or len(self._senders) >= MAX_SENDERS:
            sender.close()
            return
        self._senders[sender.fileno()] = sender
        self._door.selector.register(sender, selectors.EVENT_READ)

    def _heard(self, sender: socket.socket) -> list[directive.Report]:
        reports = _read(sender)
        if self._http is not None and any(isinstance(report, directive.ListenerWanted) for report in reports):
            with contextlib.suppress(OSError):  # who asked is gone, and its end is noticed elsewhere
                transport.send_packet(sender, b"{}", [self._http.fileno()])
        return reports

    def close(self) -> None:
        """Remove the socket and its directory."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._door.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _private_directory() -> Path:
    chosen = Path(tempfile.mkdtemp(prefix="wcache-launch-"))
    if len(os.fsencode(chosen / "report")) > MAX_SOCKET_PATH:
        # sockaddr_un has 108 bytes, and a long $TMPDIR leaves no room for a name.
        chosen.rmdir()
        chosen = Path(tempfile.mkdtemp(prefix="wcache-launch-", dir="/tmp"))
    return chosen


def _read(sender: socket.socket) -> list[directive.Report]:
    try:
        packet = transport.receive_packet(sender)
        return [directive.decode_report(packet.data)] if packet.data else []
    except (OSError, ValueError, RecursionError, ProtocolError, WeightcacheError):
        # A report is news, never a command: one that makes no sense is dropped, and missing proof is noticed later.
        return []
