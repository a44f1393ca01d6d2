"""One launch for several ranks: SGLang builds all of a host's ranks at once, and each publishes to its own agent.

The agent of the lowest rank leads: it alone starts loaders. A rank that wants to load asks the leader, the leader asks
every rank of the launch to join, and each one's connection to it then lives as long as the launch. So nobody has to be
found, every agent knows when another one is gone, and what fails anywhere ends the launch everywhere, with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from weightcache import transport
from weightcache.errors import AgentUnavailable, InUse, LoadFailed, PermissionRefused, ProtocolError, WeightcacheError
from weightcache.paths import RankPaths
from weightcache.protocol import Done, ErrorInfo, Failure, Join, Joined, Lead, Message, Progress
from weightcache.server import peers
from weightcache.server.connection import Connection, Door, PeerLeft
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.production import Production
    from weightcache.server.sets import ResidentSet

M = TypeVar("M")

JOIN_SECONDS = 60.0
"""How long an agent may take to join: it may have to be started, and to find out who uses what it adopted."""

LEAD_SECONDS = 3 * JOIN_SECONDS
"""How long a leader may take to have all ranks join, after a launch that is just ending."""

EXAMINED_SECONDS = 30.0
"""How long the examination of a suspect set is waited for; what is not known to be good by then is loaded again."""

BEAT_SECONDS = 5.0
"""A leader says this often that the launch goes on; it knows by itself when a loader does nothing."""

LAST_WORDS_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Member:
    """Another rank in a launch, as its leader sees it. ``connection`` is the leader's own."""

    rank: int
    connection: Connection
    token: str
    gpu: str


class Launch:
    """The other ranks of a launch that this agent leads; none where a rank loads alone."""

    def __init__(self, agent: Agent, production: Production) -> None:
        self._agent = agent
        self._production = production
        self.members: list[Member] = []
        self.error: ErrorInfo | None = None
        """What a member says went wrong."""
        self.failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._beat = asyncio.ensure_future(self._say_alive())

    async def gather(self) -> None:
        """Have every other rank join. Raises LoadFailed with the rank that did not."""
        settings = self._agent.settings
        self._production.retained = await take_stock(self._agent, self._production.asked, self._production.again)
        others = [rank for rank in settings.launch if rank != settings.rank]
        answers = await asyncio.gather(*map(self._join, others), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self._production.members = {member.rank for member in self.members}
        self._tasks += [asyncio.ensure_future(self._listen(member)) for member in self.members]
        self._production.joined.set()

    async def _join(self, rank: int) -> None:
        try:
            connection = await call(RankPaths(self._agent.settings.paths.directory, rank))
            try:
                production, kinship = self._production, self._agent.settings.kinship
                join = Join(production.group, production.asked, kinship, production.again)
                joined = await ask(connection, join, Joined)
            except BaseException:
                connection.close()
                raise
        except WeightcacheError as error:
            raise LoadFailed(f"rank {rank} cannot take part in the load: {error.message}") from None
        self.members.append(Member(rank, connection, joined.token, joined.gpu_uuid))

    async def _listen(self, member: Member) -> None:
        """Wait for what becomes of a member."""
        try:
            message, _ = await member.connection.receive(seconds=None)
        except (PeerLeft, WeightcacheError):
            self._production.members.discard(member.rank)
            self._fail(ErrorInfo(LoadFailed.code, f"the agent of rank {member.rank} went away"))
            return
        if isinstance(message, Failure):
            self._fail(ErrorInfo(message.code, f"rank {member.rank}: {message.message}"))
        elif not isinstance(message, Done):
            self._fail(ErrorInfo(ProtocolError.code, f"rank {member.rank} answered {type(message).__name__}"))

    def _fail(self, error: ErrorInfo) -> None:
        self.error = self.error or error
        self.failed.set()

    async def _say_alive(self) -> None:
        """Tell the others that the launch goes on, also those that joined before the last one does."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for member in tuple(self.members):
                with contextlib.suppress(PeerLeft):  # the listener knows better why
                    await member.connection.send(Progress(self._production.now()), seconds=1.0)

    async def end(self, error: ErrorInfo | None) -> None:
        """Tell the others how it ended, and forget them."""
        self._beat.cancel()
        try:
            if error is None and self._tasks:  # what they published may still be on its way into their stores
                await asyncio.wait(self._tasks, timeout=LAST_WORDS_SECONDS)
        finally:
            self._leave(Failure(error.code, error.message) if error else Done("the loader ended"))

    def _leave(self, last: Message) -> None:
        for task in self._tasks:
            task.cancel()
        for member in self.members:
            member.connection.send_now(last)
            member.connection.close()
        self.members = []


async def call(paths: RankPaths) -> Connection:
    """Connect to the agent of another rank, which this may start. Raises AgentUnavailable or PermissionRefused."""
    sock = await asyncio.to_thread(transport.connect, paths.public, time.monotonic() + JOIN_SECONDS)
    peer = peers.identify(sock)
    connection = Connection(sock, peer, Door.PUBLIC)
    # A manager's sockets show its own credentials.
    if peer.uid not in (0, os.geteuid()):
        connection.close()
        raise PermissionRefused(f"the socket {paths.public} belongs to uid {peer.uid}, which is no agent's user")
    return connection


async def ask(connection: Connection, request: Message, answer: type[M], seconds: float = JOIN_SECONDS) -> M:
    """Send ``request`` and wait for its answer. Raises the error that the other agent reports, or AgentUnavailable."""
    try:
        await connection.send(request)
        message, _ = await connection.receive(seconds)
    except PeerLeft:
        raise AgentUnavailable("its agent went away") from None
    if isinstance(message, Failure):
        raise message.error()
    if not isinstance(message, answer):
        raise ProtocolError(f"its agent answered {type(message).__name__}")
    return message


async def take_stock(agent: Agent, asked: bool, again: bool) -> tuple[ResidentSet, ...]:
    """What a rank brings into a launch: sets that it may go on with (retention.py). Raises InUse: none, nor room."""
    sets = () if again else await _retainable(agent)
    if not sets and agent.settings.config.deployment.world > 1:
        await may_load(agent, asked)
    return sets


async def _retainable(agent: Agent) -> tuple[ResidentSet, ...]:
    """All sets of the newest load, where they are sound and the load was one that the others can be measured by."""
    deadline = time.monotonic() + EXAMINED_SECONDS
    while True:
        newest = agent.sets.newest("target")
        if newest is None or not newest.record.contents or not agent.sets.whole(newest):
            return ()
        sets = tuple(s for s in agent.sets if s.id in newest.record.companions)
        if any(s.damage or s.record.configuration != agent.settings.kinship for s in sets):
            return ()
        left = deadline - time.monotonic()
        if not any(s.suspect for s in sets):
            return sets
        if left <= 0:
            return ()
        await agent.changes.wait(left)


async def may_load(agent: Agent, asked: bool) -> None:
    """Raise InUse where engines use this rank's weights and nobody ``asked`` for a second copy beside them."""
    if asked:
        return
    if len(agent.sets) and agent.settling:
        # Who uses what was adopted says so in the next seconds.
        await asyncio.sleep(agent.settling)
    if using := in_use(agent):
        raise InUse(using)


def in_use(agent: Agent) -> str:
    """Why engines would be disturbed by another copy of their weights beside them; an empty text if there are none."""
    engines = sum(len(resident.leases) for resident in agent.sets)
    if not engines:
        return ""
    using = f"{engines} engine{'s use' if engines > 1 else ' uses'} its weights"
    return f"{using}, and a load for all ranks needs room beside them: `wcache load` does it nevertheless"


async def make_room(agent: Agent, production: Production) -> None:
    """Drop what nobody uses: without the other ranks' it is of no use, and there may be no room for both.

    Called when the loader's process of this rank is about to load, so that what fails before costs nothing.
    """
    alone = agent.settings.config.deployment.world == 1
    if production.source != "loader" or production.retained or alone:
        return
    if agent.settling:
        await asyncio.sleep(agent.settling)
    going = [s for s in agent.sets.unleased() if s.record.source == "loader" or production.asked]
    await agent.drop_all(going)


async def follow(agent: Agent, production: Production) -> None:
    """Have the leader load for all ranks; its Join finds ``production``, and may come before its answer."""
    leader = agent.settings.launch[0]
    try:
        connection = await call(RankPaths(agent.settings.paths.directory, leader))
        try:
            request = Lead(agent.settings.rank, production.asked, production.again)
            asking = asyncio.ensure_future(ask(connection, request, Done, LEAD_SECONDS))
            answered = asyncio.Event()
            asking.add_done_callback(lambda _: answered.set())
            try:
                await first(answered, production.joined, production.ended)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        finally:
            connection.close()
        if not (production.joined.is_set() or production.ended.is_set()):
            asking.result()
            raise LoadFailed("it began without this one")
    except WeightcacheError as error:
        why = f"rank {leader} loads for all ranks of this host, and does not: {error.message}"
        agent.give_up(production, ErrorInfo(error.code, why))
    except BaseException:
        agent.give_up(production, None, failed=False)
        raise
