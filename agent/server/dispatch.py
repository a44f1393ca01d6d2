"""Which message is taken at which door, and what becomes of errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightcache import protocol
from weightcache.errors import Mismatch, PermissionRefused, ProtocolError, WeightcacheError
from weightcache.protocol import (
    Attach,
    Drain,
    Evict,
    Hello,
    Inspect,
    Join,
    Lead,
    Load,
    Renew,
    Resume,
    Status,
    Verify,
    Watch,
)  # fmt: skip
from weightcache.server import admin, attach, joining, publish, report, verify, watch
from weightcache.server.connection import Door, PeerLeft
from weightcache.server.journal import event

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection

log = logging.getLogger("weightcache")


async def converse(agent: Agent, connection: Connection) -> None:
    """Serve one connection to its end. Whatever goes wrong concerns this connection only."""
    try:
        await _answer(agent, connection)
    except PeerLeft:
        pass
    except WeightcacheError as error:
        if connection.door is Door.PUBLIC:
            _note(connection, error)
        differences = error.differences if isinstance(error, Mismatch) else ()
        await _refuse(connection, protocol.failure(error, differences))
    except Exception:
        log.exception("internal error while serving %s", connection.peer)
        await _refuse(connection, protocol.Failure("internal", "an internal error of the agent; its log says more"))
    finally:
        connection.close()


def _note(connection: Connection, error: WeightcacheError) -> None:
    peer = connection.peer
    told = event("refused", code=error.code, client_pid=peer.pid, client_uid=peer.uid)
    log.info("%s was refused: %s", peer, error.message, extra=told)


async def _refuse(connection: Connection, failure: protocol.Failure) -> None:
    try:
        await connection.send(failure, seconds=1.0)
    except (PeerLeft, ProtocolError) as error:
        log.info("%s was not told %s: %s", connection.peer, failure.code, error)


async def _answer(agent: Agent, connection: Connection) -> None:
    match connection.door:
        case Door.PUBLIC:
            await _public(agent, connection)
        case Door.STATUS:
            await _status(agent, connection)
        case Door.PUBLISH:
            await publish.serve(agent, connection)


async def _public(agent: Agent, connection: Connection) -> None:
    message, _ = await connection.receive()
    match message:
        case Hello():
            await connection.send(report.welcome(agent))
        case Attach():
            try:
                await attach.attach(agent, connection, message)
            except WeightcacheError as error:
                agent.refusals.note(connection.peer, message, error)
                agent.changes.notify()
                raise
        case Load():
            await attach.load(agent, connection, message)
        case Lead() | Join():
            agent.settings.require_operator(connection.peer, "start a load of several ranks")
            attach.require_giving(agent)
            if isinstance(message, Lead):
                await joining.lead(agent, connection, message)
            else:
                await joining.join(agent, connection, message)
        case _:
            raise _misplaced(message, connection)


async def _status(agent: Agent, connection: Connection) -> None:
    message, _ = await connection.receive()
    if agent.settings.only_observes(connection.peer) and not isinstance(message, Status | Watch):
        raise PermissionRefused(f"uid {connection.peer.uid} may see the status and no more")
    match message:
        case Status():
            await connection.send(report.report(agent))
        case Watch():
            await watch.watch(agent, connection, message)
        case Inspect():
            await admin.inspect(agent, connection, message)
        case Renew():
            await admin.renew(agent, connection, message)
        case Verify():
            await verify.verify(agent, connection, message)
        case Evict():
            await admin.evict(agent, connection, message)
        case Drain():
            await admin.drain(agent, connection, message)
        case Resume():
            await admin.resume(agent, connection, message)
        case _:
            raise _misplaced(message, connection)


def _misplaced(message: protocol.Message, connection: Connection) -> ProtocolError:
    return ProtocolError(f"{type(message).__name__} does not belong on the {connection.door.value} socket")
