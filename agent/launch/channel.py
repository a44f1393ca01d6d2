"""The launcher's end of the slot channel (weightcache.standby.messages): one connection a process, for its whole life.

Only processes of this user are heard, and who breaks the rules is not heard any more. Nothing here blocks: the
supervisor's selector says when there is something to read.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache import transport
from weightcache.errors import ProtocolError, WeightcacheError
from weightcache.launch.door import Door
from weightcache.standby import fence, messages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MOST_MESSAGES = 2000.0
"""Of one process at once: what its queue may hold after this process was stopped for a while, several times over."""
MESSAGES_A_SECOND = 100.0
MOST_STRANGERS = 64
"""Connections that have not said whose they are."""
AT_ONCE = 1000
"""How many descriptors are looked at in a row: others want to be heard as well."""


@dataclass(frozen=True, slots=True)
class Heard:
    """``rank``: -1 for the main process. ``answer``: None when its connection or its life has ended, ``why`` then."""

    rank: int
    answer: messages.Answer | None
    process: messages.Process
    why: str = ""


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid, _ = transport.peer_credentials(sock)
        self.pidfd = -1
        self.process = messages.Process(self.pid, 0)
        self.rank: int | None = None
        self._tokens, self._counted = MOST_MESSAGES, time.monotonic()

    def identify(self) -> None:
        """Take hold of the process; if it is another one by now, the connection has ended. Raises an error."""
        self.pidfd = os.pidfd_open(self.pid)
        self.process = fence.identify(self.pid)

    def floods(self) -> bool:
        now = time.monotonic()
        self._tokens = min(MOST_MESSAGES, self._tokens + (now - self._counted) * MESSAGES_A_SECOND) - 1
        self._counted = now
        return self._tokens < 0

    def close(self) -> None:
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Channel:
    """Listens at ``path`` for the processes of one engine with so many ranks."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._ranks = ranks
        self._connections: dict[int, _Connection] = {}
        """By the descriptors of its socket and its process."""
        self._members: dict[int, _Connection] = {}
        self._door = Door(path)

    def fileno(self) -> int:
        """Readable when somebody said something, came or went."""
        return self._door.fileno()

    def due(self) -> float:
        """When to call ``take`` although nothing is readable, on CLOCK_MONOTONIC."""
        return self._door.due()

    def take(self) -> list[Heard]:
        """What was said since the last call, in order for each process."""
        heard: list[Heard] = []
        for _ in range(AT_ONCE):
            if not (ready := self._door.ready()):
                break
            for key in ready:
                if key.fileobj is self._door.listener:
                    self._accept()
                elif (connection := self._connections.get(key.fd)) is not None:
                    heard.extend(self._hear(connection, key.fd))
        return heard

    def send(self, rank: int, order: messages.Order, fds: Sequence[int] = ()) -> bool:
        """Give an order; False if that process has gone, or reads nothing."""
        connection = self._members.get(rank)
        if connection is None:
            return False
        try:
            transport.send_packet(connection.sock, messages.encode(order), fds)
        except (OSError, ProtocolError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to every process that has joined, however lost it is."""
        for connection in self._members.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(connection.pidfd, signal.SIGKILL)

    def _accept(self) -> None:
        if (sock := self._door.accept()) is None:
            return
        connection = _Connection(sock)
        strangers = sum(1 for known in self._connections.values() if known.rank is None)
        try:
            if connection.uid != os.geteuid() or strangers >= MOST_STRANGERS:
                raise ProtocolError("not for this one")
            connection.identify()
        except (OSError, WeightcacheError):
            connection.close()
            return
        self._connections[sock.fileno()] = connection
        self._door.selector.register(sock, selectors.EVENT_READ)

    def _hear(self, connection: _Connection, fd: int) -> list[Heard]:
        if fd != connection.pidfd:
            return self._read(connection, "has closed its connection")
        heard: list[Heard] = []
        while said := self._read(connection, "has ended"):  # its last words are in the queue still, and say more
            heard += said
            if said[-1].answer is None:
                return heard
        return heard + self._drop(connection, "has ended")

    def _read(self, connection: _Connection, at_end: str) -> list[Heard]:
        """One packet; nothing if there is none. ``at_end``: why it is dropped when no more will come."""
        try:
            data = transport.receive_packet(connection.sock).data
            if not data:
                return self._drop(connection, at_end)
            answer = messages.decode_answer(data)
        except BlockingIOError:
            return []
        except OSError:
            return self._drop(connection, at_end)
        except (ValueError, RecursionError, WeightcacheError):
            return self._drop(connection, "said something that is no message")
        if connection.floods():
            return self._drop(connection, "said too much at once")
        if connection.rank is None:
            return self._join(connection, answer)
        return [Heard(connection.rank, answer, connection.process)]

    def _join(self, connection: _Connection, answer: messages.Answer) -> list[Heard]:
        known = isinstance(answer, messages.Joined) and -1 <= answer.rank < self._ranks
        if not isinstance(answer, messages.Joined) or not known or answer.rank in self._members:
            return self._drop(connection, "")
        connection.rank = answer.rank
        self._members[answer.rank] = connection
        self._connections[connection.pidfd] = connection
        self._door.selector.register(connection.pidfd, selectors.EVENT_READ)
        return [Heard(answer.rank, answer, connection.process)]

    def _drop(self, connection: _Connection, why: str) -> list[Heard]:
        """Hear it no more. A member stays held, so that it can be killed."""
        for fd in (connection.sock.fileno(), connection.pidfd):
            if self._connections.pop(fd, None) is not None:
                self._door.selector.unregister(fd)
        connection.sock.close()
        if connection.rank is None:
            connection.close()
            return []
        return [Heard(connection.rank, None, connection.process, why)]

    def close(self) -> None:
        """Let go of everybody, and remove the socket."""
        for connection in {*self._connections.values(), *self._members.values()}:
            connection.close()
        self._connections.clear()
        self._members.clear()
        self._door.close()
