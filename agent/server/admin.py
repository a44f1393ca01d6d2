"""What operators ask for: evict, drain, resume; and the lease renewals of engines whose agent was restarted."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from weightcache.errors import Empty, InUse, WeightcacheError
from weightcache.protocol import Attached, Done, Drain, DrainInfo, Evict, Inspect, LeaseStatus, Renew, Renewed, Resume
from weightcache.server import leases, loads, markers
from weightcache.server.attach import require_giving
from weightcache.server.journal import event
from weightcache.server.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.sets import ResidentSet

log = logging.getLogger("weightcache")


async def evict(agent: Agent, connection: Connection, request: Evict) -> None:
    """Drop one set or all."""
    agent.settings.require_operator(connection.peer, "evict weights")
    chosen = [s for s in agent.sets if request.set_id in (None, s.id)]
    if request.set_id is not None and not chosen:
        raise Empty(f"rank {agent.settings.rank} holds no set {request.set_id[:40]!r}")
    if not request.force and any(s.leases for s in chosen):
        raise InUse(f"{users(chosen)}; stop them first, or use --force (they keep their memory, later ones do not)")
    freed = sum(s.bytes for s in chosen)
    await agent.drop_all(chosen)
    names = ", ".join(s.id for s in chosen) or "nothing was resident"
    await connection.send(Done(f"evicted {names} ({freed} bytes)"))


async def drain(agent: Agent, connection: Connection, request: Drain) -> None:
    """Stop giving out, end a load that is under way, and wait for the engines to end."""
    agent.settings.require_operator(connection.peer, "drain a rank")
    deadline = time.monotonic() + request.wait_seconds
    if not agent.drained:
        info = DrainInfo(connection.peer.uid, time.time())
        try:
            markers.write(agent.settings.paths.drain_marker, info)
        except OSError as error:
            raise WeightcacheError(
                f"cannot write {agent.settings.paths.drain_marker} ({error.strerror}), so a drain would not hold"
            ) from None
        agent.drained = info
        by = event("drained", client_pid=connection.peer.pid, client_uid=connection.peer.uid)
        log.info("drained by %s", connection.peer, extra=by)
    agent.settle()
    await loads.cancel(agent, f"rank {agent.settings.rank} was drained while it was loading")
    while len(agent.sets) and agent.drained and (left := deadline - time.monotonic()) > 0:
        await agent.changes.wait(left)
    if len(agent.sets):
        raise InUse(f"rank {agent.settings.rank} gives out nothing more, but {users(agent.sets)}")
    await agent.releases()
    await connection.send(Done(f"rank {agent.settings.rank} is drained until `wcache resume`"))


async def resume(agent: Agent, connection: Connection, _: Resume) -> None:
    """End a drain."""
    agent.settings.require_operator(connection.peer, "resume a rank")
    was, agent.drained = agent.drained, None
    try:
        markers.remove(agent.settings.paths.drain_marker)
    except OSError as error:
        agent.drained = was
        raise WeightcacheError(f"cannot remove {agent.settings.paths.drain_marker} ({error.strerror})") from None
    if was:
        by = event("resumed", client_pid=connection.peer.pid, client_uid=connection.peer.uid)
        log.info("resumed by %s", connection.peer, extra=by)
    agent.touch()
    await connection.send(Done(f"rank {agent.settings.rank} {'gives out again' if was else 'was not drained'}"))


async def renew(agent: Agent, connection: Connection, request: Renew) -> None:
    """Take over the lease of an engine that attached through an earlier agent."""
    resident = agent.sets.get(request.set_id)
    if resident:
        lease = agent.lease(resident, connection.peer)
    else:
        lease = agent.orphan(request.set_id[:40], request.role[:40], connection.peer)
    try:
        await connection.send(Renewed(lease.id, resident is not None))
    except BaseException:
        agent.end_lease(lease)
        raise
    await leases.hold(agent, connection, lease)


async def inspect(agent: Agent, connection: Connection, request: Inspect) -> None:
    """Hand out a set for checking: no lease, because a check must not stand in the way of an eviction.

    What was received stays mapped even if the set is dropped meanwhile. A damaged set can be inspected; a drained one
    by operators (and the agent's own check) only.
    """
    # The agent's own check may run as another user, whatever the state.
    own = agent.verifying.locked() or agent.settings.may_operate(connection.peer)
    if agent.state is not State.DEGRADED and not own:
        require_giving(agent)
    chosen = agent.sets.newest("target") if request.set_id is None else agent.sets.get(request.set_id)
    if chosen is None:
        raise Empty(f"rank {agent.settings.rank} holds no such set")
    with chosen.lent() as fds:
        await connection.send(Attached(chosen.id, chosen.info.role, "", chosen.info.arenas, chosen.record.group), fds)
    await leases.until_gone(connection)


def users(sets: Iterable[ResidentSet]) -> str:
    """Who uses the sets, in words."""
    held = [f"set {s.id} is in use by {_user(lease.status)}" for s in sets for lease in s.leases.values()]
    shown = held[:20] + ([f"{len(held) - 20} more"] if len(held) > 20 else [])
    return "; ".join(shown)


def _user(lease: LeaseStatus) -> str:
    unit = f", {lease.unit}" if lease.unit else ""
    return f"pid {lease.pid} (uid {lease.uid}{unit}) {lease.command[:60]}".rstrip()
