"""Leases: one attached engine each. A lease ends with its connection or its process, whichever ends first.

Both are watched because either may outlive the other: a forked helper may inherit the connection, and a process may
close the connection and live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightcache.errors import ProtocolError
from weightcache.protocol import Faulted, LeaseStatus
from weightcache.server import peers, suspicion
from weightcache.server.connection import PeerLeft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection

log = logging.getLogger("weightcache")

LAST_WORDS_SECONDS = 0.2

AGAIN_SECONDS = 1.0
"""How long until a process that could not be watched, for want of a descriptor, is looked at again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One attached engine and the set it uses. ``began``: time.monotonic(), for ``status`` has a clock that is set."""

    set_id: str
    role: str
    status: LeaseStatus
    began: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        """12 hex digits."""
        return self.status.lease


def grant(peer: peers.Peer, set_id: str, role: str) -> Lease:
    """A new lease for the process at the other end."""
    return Lease(
        set_id,
        role,
        LeaseStatus(
            lease=secrets.token_hex(6),
            pid=peer.pid,
            uid=peer.uid,
            unit=peers.unit_of(peer.pid),
            command=peers.command_of(peer.pid),
            since=time.time(),
        ),
    )


async def hold(agent: Agent, connection: Connection, lease: Lease) -> None:
    """Keep a lease while its engine lives; then end it, and have its death looked into."""
    try:
        words, pidfd = await _until_gone(connection)
    except ProcessLookupError:
        return
    finally:
        agent.end_lease(lease)
    # Beside everything else: the connection is over, and its place is for the next one.
    agent.spawn(_judge(agent, lease, words, pidfd), optional=True)


async def _judge(agent: Agent, lease: Lease, words: str, pidfd: int | None) -> None:
    try:
        await suspicion.judge(agent, lease, words, pidfd)
    finally:
        if pidfd is not None:
            os.close(pidfd)


async def until_gone(connection: Connection) -> str:
    """Wait until the connection or the process at its other end is gone; what it said of its end, mostly nothing."""
    try:
        words, pidfd = await _until_gone(connection)
    except ProcessLookupError:
        return ""
    if pidfd is not None:
        os.close(pidfd)
    return words


async def _until_gone(connection: Connection) -> tuple[str, int | None]:
    """What the peer said of its end, mostly nothing, and its pidfd (the caller's).

    Raises ProcessLookupError where it was gone before it could be watched.
    """
    last = asyncio.ensure_future(_last_words(connection))
    pidfd = None
    try:
        pidfd = await _watched(connection, last)
        with _readable(pidfd) as ended:
            either: set[asyncio.Future[Any]] = {last, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not last.done():  # what it said before it died is still to be read
            await asyncio.wait({last}, timeout=LAST_WORDS_SECONDS)
        return last.result() if last.done() else "", pidfd
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        raise
    finally:
        last.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await last


async def _watched(connection: Connection, last: asyncio.Future[str]) -> int | None:
    """The peer's pidfd (the caller's), as soon as there is one; None if there is none, or ``last`` is done before.

    Raises ProcessLookupError if it is gone.
    """
    complained = False
    while True:
        try:
            return peers.open_pidfd(connection.channel.sock, connection.peer)
        except ProcessLookupError:
            raise
        except OSError as error:
            if not complained:
                log.warning("%s is watched by its connection alone as yet: %s", connection.peer, error.strerror)
            complained = True
        await asyncio.wait({last}, timeout=AGAIN_SECONDS)
        if last.done():
            return None


async def _last_words(connection: Connection) -> str:
    with contextlib.suppress(PeerLeft, ProtocolError):
        message, _ = await connection.receive(seconds=None)
        if isinstance(message, Faulted):
            return message.reason[:500]
    return ""


@contextlib.contextmanager
def _readable(pidfd: int | None) -> Iterator[asyncio.Future[None]]:
    """A future that is done when the process ends; never, without a pidfd."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    if pidfd is None:
        yield future
        return
    loop.add_reader(pidfd, lambda: None if future.done() else future.set_result(None))
    try:
        yield future
    finally:
        loop.remove_reader(pidfd)
