"""The publish conversation: Begin, then any number of Progress and Publish, then Commit or Abort.

A rank of a launch may Borrow what its agent holds, and end with Retain; Rejoin and Anew say what the ranks agreed on.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING

from weightcache import manifest, protocol
from weightcache.errors import PermissionRefused, ProtocolError, WeightcacheError
from weightcache.memory import memfd
from weightcache.protocol import (
    Abort,
    Accepted,
    Anew,
    Begin,
    Borrow,
    Commit,
    Committed,
    ErrorInfo,
    Progress,
    Publish,
    Published,
    Rejoin,
    Retain,
)  # fmt: skip
from weightcache.server import retention
from weightcache.server.connection import PeerLeft
from weightcache.server.launch import in_use, make_room
from weightcache.server.sets import Staged
from weightcache.transport import MAX_FDS

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.production import Production

MAX_DESCRIPTION = 32 * 1024
"""Largest description of a set without its arenas: a status packet carries several of them."""

_GROUP = re.compile(r"[0-9A-Za-z-]{1,64}")
_ROLE = re.compile(r"target|draft-[0-9]{1,4}")


async def serve(agent: Agent, connection: Connection) -> None:
    """Serve one connection of the publish socket."""
    # The token is the right to publish: one load has it, by a private way. A uid would say nothing about a loader in a
    # container. No room for descriptors before the token was right.
    message, _ = await connection.receive()
    if not isinstance(message, Begin):
        raise ProtocolError(f"{type(message).__name__} where Begin is due on the publish socket")
    production = _claim(agent, message, connection)
    error: ErrorInfo | None = None
    try:
        await make_room(agent, production)
        await connection.send(Accepted(bool(production.retained), "" if production.asked else in_use(agent)))
        while await _step(agent, production, connection):
            pass
    except WeightcacheError as problem:
        error = ErrorInfo(problem.code, problem.message)
        raise
    except PeerLeft:
        pass
    finally:
        _leave(agent, production, error)


def _claim(agent: Agent, begin: Begin, connection: Connection) -> Production:
    production = agent.production
    if production is None or production.source != begin.source or not production.admits(begin.token):
        raise PermissionRefused("this token belongs to no load that is under way")
    if production.claimed:
        raise ProtocolError("this token was used before")
    if not _GROUP.fullmatch(begin.group):
        raise ProtocolError(f"{begin.group[:80]!r} is no name of a launch")
    production.claimed = True
    production.publisher = connection
    production.published_as = production.named = begin.group
    return production


def _leave(agent: Agent, production: Production, error: ErrorInfo | None) -> None:
    if production.ended.is_set():
        return
    # This conversation ends by itself, and its last answer is still to be sent: nobody has to hang up on it.
    production.publisher = None
    production.leave(error)
    if production.source == "donor":  # a loader's end is told by its exit status, a donor's by this alone
        agent.give_up(production, production.error, failed=False)


async def _step(agent: Agent, production: Production, connection: Connection) -> bool:
    """Take one message; False when the conversation is over."""
    message, fds = await connection.receive(seconds=None, max_fds=MAX_FDS)
    if agent.production is not production or (fds and not isinstance(message, Publish)):
        agent.dispose(fds)
        _require_current(agent, production)
        raise ProtocolError("descriptors came with the wrong message")
    match message:
        case Progress(progress):
            production.advance(progress)
            await asyncio.sleep(0)  # a flood of reports must not keep the event loop to itself
            return True
        case Publish(info, contents):
            await connection.send(Published(await _stage(agent, production, info, fds, contents)))
            return True
        case Borrow():
            await retention.borrow(production, connection, message)
            return True
        case Rejoin():
            await retention.rejoin(agent, production, connection, message)
            return True
        case Anew():
            await retention.anew(agent, production, connection)
            return True
        case Retain():
            await retention.retain(agent, production, connection, message)
            return False
        case Commit(count):
            await _commit(agent, production, connection, count)
            return False
        case Abort(code, text):
            production.leave(ErrorInfo(code[:100], text[:4000]))
            return False
    raise ProtocolError(f"{type(message).__name__} does not belong on the publish socket")


async def _stage(
    agent: Agent, production: Production, info: protocol.SetInfo, fds: tuple[int, ...], contents: tuple[str, ...]
) -> str:
    try:
        taken = [staged.info.role for staged in production.staged]
        body = await asyncio.to_thread(check, info, fds, taken, agent.settings.config.memory.backend)
        retention.check(agent, production, info, body, contents)
        _require_current(agent, production)
    except BaseException:
        agent.dispose(fds)
        raise
    staged = Staged(agent.sets.new_id(), info, fds, contents)
    production.staged.append(staged)
    return staged.id


async def _commit(agent: Agent, production: Production, connection: Connection, count: int) -> None:
    if not production.staged or count != len(production.staged):
        raise ProtocolError(f"a commit of {count} sets where {len(production.staged)} were published")
    # From here on this function owns the descriptors: a load that is cancelled meanwhile must not close them.
    sets = agent.complete(production)
    try:
        await agent.keeper.keep(sets)
        _require_current(agent, production)
    except BaseException:
        agent.spawn(agent.abandon(sets))
        raise
    made = agent.commit(production, sets)
    await connection.send(Committed(tuple(resident.id for resident in made)))


def _require_current(agent: Agent, production: Production) -> None:
    """A load may be cancelled while something else is waited for."""
    if agent.production is not production:
        raise ProtocolError("this load is over")


def check(info: protocol.SetInfo, fds: tuple[int, ...], taken: list[str], backend: str) -> bytes:
    """The manifest as it is stored. Raises ProtocolError unless the descriptors are what ``info`` says.

    Device memory is opaque to the agent.
    """
    if not _ROLE.fullmatch(info.role) or info.role in taken or info.role != info.fingerprint.role:
        raise ProtocolError(f"a set of the role {info.role[:40]!r}, which is unknown, taken or not the fingerprint's")
    if len(protocol.encode(Publish(info))) > MAX_DESCRIPTION + 120 * len(info.arenas):
        raise ProtocolError(f"a description of a set larger than {MAX_DESCRIPTION} bytes")
    if not info.arenas or len(fds) != 1 + len(info.arenas):
        raise ProtocolError(f"{len(fds)} descriptors for a manifest and {len(info.arenas)} arenas")
    for number, arena in enumerate(info.arenas):
        if arena.bytes <= 0 or not 0 <= arena.used <= arena.bytes:
            raise ProtocolError(f"arena {number} of {arena.bytes} bytes uses {arena.used}")
        if backend == "host":
            _check_memfd(number, fds[1 + number], arena.bytes)
    body = memfd.read_sealed(fds[0], manifest.MAX_BYTES)
    content = manifest.decode(body)
    used = sum(arena.used for arena in info.arenas)
    if content.bytes > used:
        raise ProtocolError(f"a manifest of {content.bytes} bytes over arenas that use {used}")
    return body


def _check_memfd(number: int, fd: int, size: int) -> None:
    if not memfd.is_sealed(fd):
        raise ProtocolError(f"arena {number} is no sealed memory file")
    actual = os.fstat(fd).st_size
    if actual != size:
        raise ProtocolError(f"arena {number} has {actual} bytes, announced were {size}")
