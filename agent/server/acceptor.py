"""Accepting connections: a cap for each user, and a pause instead of a spin when descriptors run out."""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import TYPE_CHECKING

from weightcache import protocol
from weightcache.server import peers
from weightcache.server.connection import Connection, Door
from weightcache.server.dispatch import converse

if TYPE_CHECKING:
    import socket

    from weightcache.server.app import Agent

log = logging.getLogger("weightcache")

PER_UID = 64
"""Connections of one user at one door, root's too: each may hold one unread packet of descriptors (unix(7))."""

PAUSE_SECONDS = 1.0
_BATCH = 32


class Acceptor:
    """Serves one listening socket."""

    def __init__(self, agent: Agent, sock: socket.socket, door: Door) -> None:
        sock.setblocking(False)
        self._agent, self._sock, self._door = agent, sock, door
        self._count: collections.Counter[int] = collections.Counter()
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
        if self._count[peer.uid] >= PER_UID:
            text = f"uid {peer.uid} has {PER_UID} connections here already"
            connection.send_now(protocol.Failure("not-ready", text))
            connection.close()
            return
        self._count[peer.uid] += 1
        task = self._loop.create_task(converse(self._agent, connection))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, peer.uid))

    def _done(self, task: asyncio.Task[None], uid: int) -> None:
        self._tasks.discard(task)
        self._count[uid] -= 1
        if not self._count[uid]:
            del self._count[uid]
        if not task.cancelled() and (error := task.exception()):
            log.error("internal error", exc_info=error)
