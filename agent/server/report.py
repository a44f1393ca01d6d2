"""The rank's status as records, for the wire and for the status file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from typing import TYPE_CHECKING

import weightcache
from weightcache import protocol, transport
from weightcache.protocol import RankReport, RankStatus, SetStatus, Welcome

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.sets import ResidentSet

_SHOWN_LEASES = 20


def welcome(agent: Agent) -> Welcome:
    """The answer to Hello."""
    settings = agent.settings
    return Welcome(weightcache.__version__, settings.rank, agent.state, settings.config.memory.backend, settings.gpu)


def status(agent: Agent) -> RankStatus:
    """Everything there is to know."""
    settings = agent.settings
    newest = agent.sets.newest("target")
    return RankStatus(
        rank=settings.rank,
        state=agent.state.value,
        backend=settings.config.memory.backend,
        gpu_uuid=settings.gpu,
        version=weightcache.__version__,
        pid=os.getpid(),
        uptime_seconds=round(time.monotonic() - agent.started, 3),
        model=newest.info.model if newest else settings.model,
        sets=tuple(_set(resident) for resident in agent.sets),
        orphans=tuple(lease.status for lease in agent.orphans.values()),
        progress=agent.production.now() if agent.production else None,
        error=agent.error,
        drained=agent.drained,
    )


def _set(resident: ResidentSet) -> SetStatus:
    info = resident.info
    return SetStatus(
        id=resident.id,
        role=info.role,
        model=info.model,
        revision=info.revision,
        version=resident.version,
        bytes=resident.bytes,
        arenas=len(info.arenas),
        tensors=info.tensors,
        fingerprint=info.fingerprint,
        digest=hashlib.sha256("".join(arena.digest for arena in info.arenas).encode()).hexdigest()[:32],
        published_at=resident.published_at,
        load_seconds=info.load_seconds,
        bytes_read=info.bytes_read,
        leases=tuple(lease.status for lease in resident.leases.values()),
    )


def report(agent: Agent) -> RankReport:
    """The answer to Status; with very many leases, only as much of them as one packet carries."""
    whole = RankReport(status(agent))
    if len(protocol.encode(whole)) <= transport.MAX_PACKET:
        return whole
    short = dataclasses.replace(
        whole.status,
        sets=tuple(dataclasses.replace(s, leases=s.leases[:_SHOWN_LEASES]) for s in whole.status.sets),
        orphans=whole.status.orphans[:_SHOWN_LEASES],
    )
    return RankReport(short)
