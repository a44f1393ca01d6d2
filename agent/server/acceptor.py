"""Accepting connections: a cap for each user, and a pause instead of a spin when descriptors run out."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from weightcache import protocol
from weightcache.errors import ProtocolError
from weightcache.server import peers
from weightcache.server.connection import Connection, Door, PeerLeft
from weightcache.server.dispatch import converse

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from weightcache.server.app import Agent

log = logging.getLogger("weightcache")

PER_UID = 64
"""Connections of one user at one door, root's too: each may hold one unread packet of descriptors (unix(7))."""

MOST_REFUSED = 16
"""Connections of one user at one door beyond that which are told why and are not closed yet."""

REFUSED_SECONDS = 1.0
"""How long such a client may take to send its request. Were the connection closed before, it would see that its request
could not be sent or was lost, and not the answer that waits for it.
"""

PAUSE_SECONDS = 1.0
_BATCH = 32


class Acceptor:
    """Serves one listening socket."""

    def __init__(self, agent: Agent, sock: socket.socket, door: Door) -> None:
        sock.setblocking(False)
        self._agent, self._sock, self._door = agent, sock, door
        self._count: collections.Counter[int] = collections.Counter()
        self._refused: collections.Counter[int] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def busy(self) -> bool:
        """Whether a conversation is going on."""
        return bool(self._tasks)

    def start(self) -> None:
        """Begin to accept."""
        self._paused = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def stop(self) -> None:
        """Accept nothing more; connections go on."""
        if self._paused:
            self._paused.cancel()
        self._loop.remove_reader(self._sock.fileno())

    async def close(self) -> None:
        """End all connections."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too few descriptors or too little memory
                # The listener stays readable, so going on at once would spin and starve everybody else.
                log.warning("cannot accept on the %s socket: %s; pausing", self._door.value, error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._paused = self._loop.call_later(PAUSE_SECONDS, self.start)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        peer = peers.identify(sock)
        connection = Connection(sock, peer, self._door)
        if self._count[peer.uid] < PER_UID:
            self._begin(converse(self._agent, connection), self._count, peer.uid)
            return
        connection.send_now(protocol.Failure("not-ready", f"uid {peer.uid} has {PER_UID} connections here already"))
        if self._refused[peer.uid] < MOST_REFUSED:
            self._begin(_see_off(connection), self._refused, peer.uid)
        else:
            connection.close()

    def _begin(self, work: Coroutine[Any, Any, None], count: collections.Counter[int], uid: int) -> None:
        count[uid] += 1
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, count, uid))

    def _done(self, task: asyncio.Task[None], count: collections.Counter[int], uid: int) -> None:
        self._tasks.discard(task)
        count[uid] -= 1
        if not count[uid]:
            del count[uid]
        if not task.cancelled() and (error := task.exception()):
            log.error("internal error", exc_info=error)


async def _see_off(connection: Connection) -> None:
    """Close a connection on which all is said as soon as its request, which nobody reads, has come."""
    try:
        connection.end_answers()
        with contextlib.suppress(PeerLeft, ProtocolError):
            await connection.receive(REFUSED_SECONDS)
    finally:
        connection.close()
