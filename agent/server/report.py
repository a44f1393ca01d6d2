"""The rank's status as records, for the wire and for the status file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

import weightcache
from weightcache import protocol, transport
from weightcache.protocol import LoadProgress, Observed, RankReport, RankStatus, SetStatus, Welcome

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.sets import ResidentSet

T = TypeVar("T")

_SHOWN_LEASES = 20
_LONGEST_PATH = 4096
_BARE_SETS = 5
_BARE_TEXT = 40
"""Characters of twelve bytes each at most; a GPU's UUID has so many."""

_LARGEST = 2**63 - 1


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
        leases_total=len(resident.leases),
        group=resident.record.group,
    )


def report(agent: Agent, reserved: int = 0) -> RankReport:
    """The answer to Status, or to Watch, where ``reserved`` bytes are for events: as much as the packet carries."""
    return RankReport(fitting(status(agent), transport.MAX_PACKET - reserved))


def fitting(whole: RankStatus, room: int) -> RankStatus:
    """``whole``, or as little less of it as makes a packet of at most ``room`` bytes (96 KiB are always enough)."""
    found = whole
    for shortened in _LADDER:
        # An Observed is the larger one of the two answers.
        if len(protocol.encode(Observed(found, ()))) <= room:
            break
        found = shortened(found)
    return found


def _without_refusals(status: RankStatus) -> RankStatus:
    return dataclasses.replace(status, refusals=())


def _with_few_leases(status: RankStatus) -> RankStatus:
    sets = tuple(dataclasses.replace(entry, leases=entry.leases[-_SHOWN_LEASES:]) for entry in status.sets)
    return dataclasses.replace(status, sets=sets, orphans=status.orphans[-_SHOWN_LEASES:])


def _with_paths(status: RankStatus) -> RankStatus:
    # A launcher compares paths, which thus have to be whole; what is longer describes.
    return _clipped(status, _LONGEST_PATH)


def _bare(status: RankStatus) -> RankStatus:
    sets = tuple(dataclasses.replace(entry, leases=()) for entry in status.sets[-_BARE_SETS:])
    return _clipped(dataclasses.replace(status, sets=sets, orphans=()), _BARE_TEXT)


_LADDER = (_without_refusals, _with_few_leases, _with_paths, _bare)
"""From what is missed least to what always fits."""


def _clipped(value: T, longest: int) -> T:
    """``value`` with texts of at most ``longest`` characters and numbers of at most 64 bits, however deep they are."""
    clipped: Any = value
    if isinstance(value, str) and len(value) > longest:
        clipped = value[: longest - 3] + "..."
    elif isinstance(value, int):
        clipped = max(min(value, _LARGEST), -_LARGEST)
    elif isinstance(value, tuple):
        clipped = tuple(_clipped(item, longest) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _clipped(getattr(value, field.name), longest) for field in dataclasses.fields(value)}
        clipped = dataclasses.replace(value, **fields)
    return cast("T", clipped)
