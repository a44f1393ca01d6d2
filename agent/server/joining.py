"""The other side of a launch of several ranks: to lead one when a rank asks, to take part when the leader asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError, InUse, LoadFailed, ProtocolError, WeightcacheError, from_code
from weightcache.protocol import Done, ErrorInfo, Failure, Join, Joined, Lead, Progress
from weightcache.server import loads
from weightcache.server.connection import PeerLeft
from weightcache.server.launch import LAST_WORDS_SECONDS, LEAD_SECONDS, take_stock
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.production import Production

SILENCE_SECONDS = 60.0
"""After this time without a word from the leader, a launch is over."""


async def lead(agent: Agent, connection: Connection, request: Lead) -> None:
    """Start a launch for all ranks, or find the rank that asks in the one that is under way."""
    settings = agent.settings
    if settings.launch[0] != settings.rank or request.rank not in settings.launch:
        asks = f"rank {settings.rank} does not lead rank {request.rank}"
        raise ProtocolError(f"{asks}: their agents were started with different configurations")
    gone = asyncio.Event()
    watching = asyncio.ensure_future(connection.closed())
    watching.add_done_callback(lambda _: gone.set())
    try:
        await _led(agent, request, gone)
        await connection.send(Done("all ranks take part"))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _led(agent: Agent, request: Lead, gone: asyncio.Event) -> None:
    """Return when the rank takes part, or is gone. Raises what makes it impossible."""
    deadline = time.monotonic() + LEAD_SECONDS
    while not gone.is_set() and (left := deadline - time.monotonic()) > 0:
        production = agent.production
        if production is None:
            # The last one may have failed because the rank that asks now was gone.
            if delay := agent.backoff.left(time.monotonic()):
                await first(gone, seconds=min(delay, left))
                continue
            production = loads.begin(agent, request.asked, request.again)
        if request.rank in production.members:
            return
        if production.joined.is_set():  # without this rank, which has to wait for its end
            await first(production.ended, gone, seconds=left)
            continue
        await first(production.joined, production.ended, gone, seconds=left)
        if production.error:
            raise from_code(production.error.code, production.error.message)
    if not gone.is_set():
        raise InUse("another load is under way")


async def join(agent: Agent, connection: Connection, request: Join) -> None:
    """Take part in a launch, until it is over for this rank."""
    settings = agent.settings
    if settings.error:
        raise from_code(settings.error.code, settings.error.message)
    if request.configuration != settings.kinship:
        raise ConfigError("its agent was started with another configuration: restart the agents of all ranks")
    production = agent.production
    if production is not None and production.source == "loader" and production.joined.is_set():
        # Of a leader that was killed, perhaps: this rank learns of its end at the same time.
        await first(production.ended, seconds=2 * LAST_WORDS_SECONDS)
    retained = await take_stock(agent, request.asked, request.again)
    production = agent.production
    if production is None:
        agent.forget_failure()
        production = agent.start("loader", request.group)
    elif production.source != "loader" or production.joined.is_set():
        raise InUse(f"rank {settings.rank} is in the middle of another load")
    production.group = production.published_as = request.group
    production.asked, production.again, production.retained = request.asked, request.again, retained
    production.joined.set()
    error: ErrorInfo | None = None
    try:
        await connection.send(Joined(production.token, settings.gpu))
        error = await _outcome(connection, production)
    except (PeerLeft, WeightcacheError):
        error = _failed(f"the agent of rank {settings.launch[0]}, which led the load, went away")
    finally:
        agent.give_up(production, error)
    with contextlib.suppress(PeerLeft):
        await connection.send(Failure(error.code, error.message) if error else Done("published"))


async def _outcome(connection: Connection, production: Production) -> ErrorInfo | None:
    """None when this rank has published; otherwise why it will not, from its loader or from the leader."""
    leader = asyncio.ensure_future(_listen(connection, production))
    over = asyncio.Event()
    leader.add_done_callback(lambda _: over.set())
    try:
        await first(production.left, over)
        vain = over.is_set() and production.publisher is None and not production.committed
        if not production.error and not vain:  # the other one of the two may know more
            other = over if production.left.is_set() else production.left
            await first(production.ended, other, seconds=LAST_WORDS_SECONDS)
        if production.committed:
            return None
        if production.error:
            return production.error
        if leader.done():
            return leader.result() or _failed("the loader ended without this rank's weights")
        return _failed("the load was given up" if production.ended.is_set() else "its process of the loader vanished")
    finally:
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)


async def _listen(connection: Connection, production: Production) -> ErrorInfo | None:
    """The leader's last word: None when its loader ended well. Raises PeerLeft."""
    while True:
        message, _ = await connection.receive(seconds=SILENCE_SECONDS)
        match message:
            case Progress():
                production.alive_at = time.monotonic()
            case Done():
                return None
            case Failure(code, text):
                return ErrorInfo(code, text)
            case _:
                raise ProtocolError(f"the leader said {type(message).__name__}")


def _failed(text: str) -> ErrorInfo:
    return ErrorInfo(LoadFailed.code, text)
