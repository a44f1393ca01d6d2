"""A launch that brings back what some ranks lost: the others take part in it, and go on with what they hold.

SGLang builds all ranks of a host at once, but only those that lost their weights have to load. The others' processes of
the loader borrow their agent's sets, as an engine would, and no agent publishes what it has. What was loaded again has
to be what was lost, byte by byte: all ranks of a launch know what each of them published (weightcache.content). Then it
belongs to the group that the others are of, and these never notice. Otherwise all ranks load anew.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

from weightcache import content
from weightcache.errors import Empty, InUse, LoadFailed, Mismatch, ProtocolError
from weightcache.fingerprint import diff
from weightcache.protocol import Accepted, Committed, Lent, failure
from weightcache.server.launch import make_room, may_load

if TYPE_CHECKING:
    from weightcache.protocol import Borrow, Rejoin, Retain, SetInfo
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.production import Production

RENEWAL_SECONDS = 3.0
"""Within this time of an agent's start, engines have said that they use what an earlier agent held."""

_CONTENT = re.compile(f"[0-9a-f]{{{content.DIGITS}}}")


async def borrow(production: Production, connection: Connection, request: Borrow) -> None:
    """Lend a set to this rank's process of the loader; what stands in the way is told, and ends nothing."""
    resident = next((s for s in production.retained if s.info.role == request.role), None)
    if resident is None:
        await connection.send(failure(Empty(f"it holds no {request.role[:40]} weights of that load")))
        return
    if differences := diff(resident.info.fingerprint, request.fingerprint):
        fields = ", ".join(difference.field for difference in differences)
        await connection.send(failure(Mismatch(f"what it holds was loaded under other conditions ({fields})")))
        return
    with resident.lent() as fds:
        await connection.send(Lent(resident.info.arenas, resident.record.group, resident.record.contents), fds)


async def rejoin(agent: Agent, production: Production, connection: Connection, request: Rejoin) -> None:
    """Note which load this rank's set will belong to. Raises InUse where an engine still maps what was lost."""
    if not production.asked:
        await asyncio.sleep(max(agent.started + RENEWAL_SECONDS - time.monotonic(), 0))
        if agent.orphans:
            pids = ", ".join(str(pid) for pid in sorted({lease.status.pid for lease in agent.orphans.values()}))
            raise InUse(
                f"pid {pids} still uses weights that this rank does not hold any more, and loading them again needs "
                "room beside it: `wcache load` does it nevertheless"
            )
    production.published_as = request.group
    production.rejoining[request.role] = request.content
    await connection.send(Accepted())


async def anew(agent: Agent, production: Production, connection: Connection) -> None:
    """Load for all ranks after all: what this one holds goes, if nobody uses it. Raises InUse if somebody does."""
    await may_load(agent, production.asked)
    production.published_as = production.named
    production.rejoining.clear()
    production.retained = ()
    await make_room(agent, production)
    await connection.send(Accepted())


async def retain(agent: Agent, production: Production, connection: Connection, request: Retain) -> None:
    """End the load with what is resident. Raises LoadFailed where that is gone by now."""
    sets = production.retained
    if not sets or production.staged or any(s.record.group != request.group for s in sets):
        raise ProtocolError(f"rank {agent.settings.rank} has nothing to retain of {request.group[:64]!r}")
    if any(agent.sets.get(s.id) is not s or s.damage for s in sets):
        raise LoadFailed("this rank lost its weights while others loaded theirs")
    agent.retain(production)
    await connection.send(Committed(tuple(resident.id for resident in sets)))


def check(agent: Agent, production: Production, info: SetInfo, body: bytes, contents: tuple[str, ...]) -> None:
    """Raise ProtocolError unless a set is what the publisher told all ranks, and what a rank lost that rejoins others.

    ``body`` is its manifest, as it is stored.
    """
    if not contents and not production.rejoining:
        return
    deployment = agent.settings.config.deployment
    if len(contents) != deployment.world or not all(map(_CONTENT.fullmatch, contents)):
        raise ProtocolError(f"{len(contents)} contents of {deployment.world} ranks")
    own = content.content_of(info, body)
    if own != contents[deployment.in_replica(agent.settings.rank)]:
        raise ProtocolError("a set that does not hold what its publisher says")
    if production.rejoining and production.rejoining.get(info.role) != own:
        raise ProtocolError(f"{info.role} weights that are not those which this rank lost")
