"""Giving out: attach, the wait for a load, invitations to donate, and the explicit load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import Degraded, Drained, Empty, Mismatch, StillLoading, from_code
from weightcache.fingerprint import CONSEQUENCES, Difference, diff
from weightcache.protocol import Attach, Attached, DonationInvited, Load, Loaded, LoadProgress, Progress
from weightcache.server import leases, loads, suspicion
from weightcache.server.production import Holder
from weightcache.server.states import State
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.production import Production
    from weightcache.server.sets import ResidentSet

PROGRESS_SECONDS = 0.5
_LONGEST_VALUE = 1000


async def attach(agent: Agent, connection: Connection, request: Attach) -> None:
    """Give out the matching set and keep the lease; or wait for one; or invite a donation; or say why not."""
    began = time.monotonic()
    deadline = began + request.wait_seconds
    at_once = True
    may_evict = request.evict
    configured: str | None = None
    while True:
        require_giving(agent)
        if resident := agent.sets.find(request.role, request.fingerprint):
            if not resident.suspect:
                return await _hand_out(agent, connection, resident, began if at_once else None)
            at_once = False
            await _until_examined(agent, connection, resident, deadline)
            continue
        at_once = False
        if (production := agent.production) is None:
            if resident := agent.sets.newest(request.role):
                await _make_way(agent, resident, request, may_evict)
                may_evict = False  # what is loaded next is not evicted again, or this would go round for ever
                continue
            if _may_donate(agent, connection, request):
                return await _invite(agent, connection, request, agent.start("donor", request.group))
            if configured is None:
                configured = await asyncio.to_thread(_resolved, agent.settings.model)
                continue  # much may have happened meanwhile
            production = _load_for(agent, request, configured)
        elif _same_donor(production, connection, request):
            return await _invite(agent, connection, request, production)
        await wait_for(connection, production, deadline)


async def load(agent: Agent, connection: Connection, request: Load) -> None:
    """Load the configured model, or find that it is resident already, with all sets of its load."""
    deadline = time.monotonic() + request.wait_seconds
    if again := request.again:
        agent.settings.require_operator(connection.peer, "load again what is resident")
    while True:
        require_giving(agent)
        resident = agent.sets.newest("target")
        if agent.production is None and resident and agent.sets.whole(resident) and not again:
            return await connection.send(Loaded(resident.id))
        production = agent.production or loads.begin(agent, asked=True, again=again)
        again = False
        await wait_for(connection, production, deadline)


def require_giving(agent: Agent) -> None:
    """Raise Drained or Degraded where nothing may be given out."""
    rank = agent.settings.rank
    if agent.leaving:
        raise agent.leaving
    if agent.drained:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(agent.drained.at))
        raise Drained(f"rank {rank} was drained by uid {agent.drained.uid} at {at} until `wcache resume`")
    if agent.state is State.DEGRADED:
        bad = ", ".join(s.id for s in agent.sets if s.damage)
        raise Degraded(f"rank {rank} holds damaged weights (set {bad}): `wcache evict` them, then `wcache load`")


async def wait_for(connection: Connection, production: Production, deadline: float) -> None:
    """Report progress until the load is decided. Raises StillLoading at the deadline, or the loader's own error."""
    while not production.ended.is_set():
        left = deadline - time.monotonic()
        if left <= 0:
            raise StillLoading(f"a load is under way: {in_words(production.now())}")
        await connection.send(Progress(production.now()))
        await first(production.ended, seconds=min(PROGRESS_SECONDS, left))
    # A donor's failure is not the waiter's: it may find the rank empty and donate or load itself.
    if production.error and production.source == "loader" and not production.committed:
        raise from_code(production.error.code, production.error.message)


def in_words(progress: LoadProgress) -> str:
    """Progress as the end of a sentence."""
    total = f" of {progress.bytes_total}" if progress.bytes_total else ""
    return f"phase {progress.phase}, {progress.bytes_done}{total} bytes, {progress.seconds:.0f} s so far"


async def _hand_out(agent: Agent, connection: Connection, resident: ResidentSet, began: float | None) -> None:
    # The lease comes first, so that the set cannot be evicted between the answer and its arrival.
    lease = agent.lease(resident, connection.peer)
    try:
        with resident.lent() as fds:
            await connection.send(_attached(resident, lease.id), fds)
    except BaseException:
        agent.end_lease(lease)
        raise
    if began is not None:
        agent.measures.attached(time.monotonic() - began)
    await leases.hold(agent, connection, lease)


def _attached(resident: ResidentSet, lease: str) -> Attached:
    return Attached(resident.id, resident.info.role, lease, resident.info.arenas, resident.record.group)


async def _until_examined(agent: Agent, connection: Connection, resident: ResidentSet, deadline: float) -> None:
    """Wait for the verdict on a suspect set. Raises StillLoading at the deadline."""
    started = time.monotonic()
    while resident.suspect:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StillLoading(f"set {resident.id} is being verified: {resident.suspect}")
        seconds = round(time.monotonic() - started, 1)
        await connection.send(Progress(LoadProgress("verifying", 0, resident.bytes, seconds)))
        await agent.changes.wait(min(PROGRESS_SECONDS, left))


async def _make_way(agent: Agent, resident: ResidentSet, request: Attach, may_evict: bool) -> None:
    """Drop a set that does not match, where the engine asks for it and may; else raise Mismatch."""
    differences = diff(resident.info.fingerprint, request.fingerprint)
    fields = ", ".join(d.field for d in differences)
    sentence = f"rank {agent.settings.rank} holds other weights than this engine needs ({fields})"
    if not may_evict:
        raise _mismatch(sentence, differences)
    if not agent.settings.config.policy.clients_may_evict_unleased:
        raise _mismatch(f"{sentence}, and [policy] clients_may_evict_unleased is off", differences)
    if pids := sorted({lease.status.pid for s in agent.sets for lease in s.leases.values() if _in_way(s, request)}):
        raise _mismatch(f"{sentence}, and they are in use by pid {', '.join(map(str, pids))}", differences)
    # All sets of a load belong together: a draft set is of no use without its target.
    going = [s for s in agent.sets.unleased() if _in_way(s, request) or request.role == "target"]
    await agent.drop_all(going)


def _in_way(resident: ResidentSet, request: Attach) -> bool:
    return resident.info.role == request.role


def _mismatch(sentence: str, differences: tuple[Difference, ...]) -> Mismatch:
    error = Mismatch(sentence)
    # Both sides' longest values together would not fit one packet.
    error.differences = tuple(difference.clipped(_LONGEST_VALUE) for difference in differences)
    return error


def _may_donate(agent: Agent, connection: Connection, request: Attach) -> bool:
    settings = agent.settings
    return (
        request.donate
        and settings.config.policy.donation
        and settings.error is None
        and settings.may_publish(connection.peer)
    )


def _same_donor(production: Production, connection: Connection, request: Attach) -> bool:
    """Whether this is the invited process itself, asking for its next model (a draft beside its target)."""
    return (
        request.donate
        and production.source == "donor"
        and production.group == request.group
        and any(holder.peer == connection.peer for holder in production.holders)
    )


def _load_for(agent: Agent, request: Attach, configured: str) -> Production:
    """Start the configured load, unless it is plain already that it cannot give what the engine needs."""
    if agent.sets.newest("target"):
        others = ", ".join(sorted({s.info.role for s in agent.sets}))
        dropped = any(not agent.sets.whole(s) for s in agent.sets)
        hint = "; a set of their load was dropped, `wcache load` loads all of them again" * dropped
        raise Empty(f"rank {agent.settings.rank} holds no {request.role[:40]} weights, only: {others}{hint}")
    wanted = request.fingerprint.model_path
    if configured and configured != wanted:
        difference = Difference("model_path", configured, wanted, CONSEQUENCES["model_path"])
        raise _mismatch(f"rank {agent.settings.rank} is configured for another model", (difference,))
    return loads.begin(agent)


def _resolved(model: str) -> str:
    """The real path of a model directory; empty for the name of a model hub, which only the loader can resolve."""
    path = Path(model)
    try:
        return str(path.resolve()) if model and path.exists() else ""
    except OSError:  # below a directory that is not for the agent's user
        return ""


async def _invite(agent: Agent, connection: Connection, request: Attach, production: Production) -> None:
    """Let the engine donate its own load; this connection holds the invitation, and later the lease."""
    holder = Holder(request.role, connection.peer)
    production.holders.append(holder)
    gone = asyncio.ensure_future(leases.until_gone(connection))
    ended = asyncio.ensure_future(production.ended.wait())
    try:
        await connection.send(DonationInvited(production.token))
        limit = agent.settings.config.loader.timeout_seconds
        await asyncio.wait({gone, ended}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        agent.give_up(production, None, failed=False)
        if holder.lease:
            words = await gone
            agent.spawn(suspicion.judge(agent, holder.lease, words, None))
    finally:
        agent.give_up(production, None, failed=False)
        if holder.lease:
            agent.end_lease(holder.lease)
        for task in (gone, ended):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
