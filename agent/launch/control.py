"""Where the launcher of a slot takes commands (weightcache.standby.control): one packet, one reply.

Whoever may write to the socket may give them: root, the launcher's user, its group. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import TYPE_CHECKING

from weightcache import transport
from weightcache.errors import ProtocolError, WeightcacheError
from weightcache.launch.door import Door
from weightcache.standby.control import Command, Reply, decode_command, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODE = 0o660
MOST_CLIENTS = 32
PATIENCE = 10.0
"""Seconds that a client has for its command."""
AT_ONCE = 100
LONGEST_TEXT = 1000
"""Of a reply that goes without its status, which makes it too large for a packet."""


class Control:
    """Listens at ``path``, where nobody else does; ``carry_out`` answers a command at once."""

    def __init__(self, path: Path, carry_out: Callable[[Command], Reply]) -> None:
        self._carry_out = carry_out
        self._clients: dict[int, tuple[socket.socket, float]] = {}
        self._door = Door(path, MOST_CLIENTS, MODE)

    def fileno(self) -> int:
        """Readable when somebody came or asked."""
        return self._door.fileno()

    def due(self) -> float:
        """When to call ``attend`` although nothing is readable, on CLOCK_MONOTONIC."""
        return self._door.due()

    def attend(self) -> None:
        """Answer who has asked, and let go of who does not."""
        for _ in range(AT_ONCE):
            if not (ready := self._door.ready()):
                break
            for key in ready:
                if key.fileobj is self._door.listener:
                    self._accept()
                else:
                    self._answer(self._forget(key.fd))
        now = time.monotonic()
        for fd, (_, came) in list(self._clients.items()):
            if now - came > PATIENCE:
                self._forget(fd).close()

    def _accept(self) -> None:
        if (client := self._door.accept()) is None:
            return
        if len(self._clients) >= MOST_CLIENTS:
            client.close()
            return
        self._clients[client.fileno()] = client, time.monotonic()
        self._door.selector.register(client, selectors.EVENT_READ)

    def _forget(self, fd: int) -> socket.socket:
        client, _ = self._clients.pop(fd)
        self._door.selector.unregister(client)
        return client

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            try:
                data = transport.receive_packet(client).data
                if not data:
                    return
                reply = self._carry_out(decode_command(data))
            except WeightcacheError as error:
                reply = Reply(False, error.message)
            except ValueError as error:
                reply = Reply(False, f"that is no command ({str(error)[:200]})")
            try:
                transport.send_packet(client, encode(reply))
            except ProtocolError:  # a status that no packet can hold must not end an engine
                text = reply.text[:LONGEST_TEXT] or "the status is too large to be sent"
                transport.send_packet(client, encode(Reply(reply.ok, text)))

    def close(self) -> None:
        """Remove the socket."""
        for fd in list(self._clients):
            self._forget(fd).close()
        self._door.close()
