"""The rank's status as records, for the wire and for the status file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from typing import TYPE_CHECKING

import weightcache
from weightcache import protocol, transport
from weightcache.protocol import LoadProgress, RankReport, RankStatus, SetStatus, Welcome

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.sets import ResidentSet

_SHOWN_LEASES = 20


def welcome(agent: Agent) -> Welcome:
    """The answer to Hello."""
    settings = agent.settings
    return Welcome(weightcache.__version__, settings.rank, agent.state, agent.backend, agent.gpu)


def status(agent: Agent) -> RankStatus:
    """Everything there is to know."""
    settings = agent.settings
    newest = agent.sets.newest("target")
    return RankStatus(
        rank=settings.rank,
        state=agent.state.value,
        backend=agent.backend,
        gpu_uuid=agent.gpu,
        version=weightcache.__version__,
        pid=os.getpid(),
        uptime_seconds=round(time.monotonic() - agent.started, 3),
        model=newest.info.model if newest else settings.model,
        sets=tuple(_set(resident) for resident in agent.sets),
        orphans=tuple(lease.status for lease in agent.orphans.values()),
        progress=agent.production.now() if agent.production else None,
        error=agent.error,
        drained=agent.drained,
        kept=agent.keeper.kept,
        counts=dict(agent.history.counts),
        measured=agent.measures.now(),
        refusals=tuple(agent.refusals),
    )


def one_line(agent: Agent) -> str:
    """The state for ``systemctl status``."""
    note = " (NOT safe from a crash: the service manager does not hold the descriptors)" * (agent.keeper.kept == "lost")
    if agent.drained:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(agent.drained.at))
        engines = sum(len(resident.leases) for resident in agent.sets)
        using = f", {engines} engines still use the weights" * bool(engines)
        return f"drained by uid {agent.drained.uid} at {at}, until `wcache resume`{using}"
    if production := agent.production:
        return f"loading: {_progress(production.now())}"
    held = ", ".join(
        f"{resident.info.model or resident.info.role} ({resident.bytes / 1e9:.1f} GB)" for resident in agent.sets
    )
    engines = sum(len(resident.leases) for resident in agent.sets)
    reason = f": {agent.error.message}" if agent.error else ""
    if not held:
        return f"{agent.state}{reason}"
    return f"{agent.state}{reason}: {held}, {engines} engine{'s' * (engines != 1)}{note}"


def _progress(progress: LoadProgress) -> str:
    if not progress.bytes_total:
        return f"{progress.phase}, {progress.seconds:.0f} s"
    percent = 100 * progress.bytes_done // progress.bytes_total
    rate = f", {progress.bytes_done / progress.seconds / 1e9:.1f} GB/s" if progress.seconds else ""
    return f"{progress.phase}, {percent} % of {progress.bytes_total / 1e9:.1f} GB{rate}, {progress.seconds:.0f} s"


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
        suspect=resident.suspect[:500],
    )


def report(agent: Agent, reserved: int = 0) -> RankReport:
    """The answer to Status; of very many leases, as many as a packet carries beside ``reserved`` other bytes."""
    whole = RankReport(status(agent))
    if len(protocol.encode(whole)) <= transport.MAX_PACKET - reserved:
        return whole
    short = dataclasses.replace(
        whole.status,
        sets=tuple(dataclasses.replace(s, leases=s.leases[:_SHOWN_LEASES]) for s in whole.status.sets),
        orphans=whole.status.orphans[:_SHOWN_LEASES],
        refusals=(),
    )
    return RankReport(short)
