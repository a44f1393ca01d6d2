"""A snapshot as metrics, in OpenMetrics or in Prometheus' older text format.

Of an agent that does not answer only that is reported, and where its rank is: what it last said may not be true any
more, and a series that ends tells more than one that stands still.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from weightcache.errors import tree
from weightcache.monitor import brief, labels, standby
from weightcache.monitor.families import CAUSES, ENGINE_ROLES, EVENTS, KEPT, LOADS, OTHER, REFUSALS, STATES
from weightcache.monitor.page import Page
from weightcache.status import ATTACH_BOUNDS

if TYPE_CHECKING:
    from weightcache.monitor.gpus import Gpu
    from weightcache.monitor.snapshot import Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import RankStatus, SetStatus
    from weightcache.standby.listing import EngineView

OPENMETRICS = "application/openmetrics-text"
CODES = tuple(sorted({error.code for error in tree()}))


def text(snapshot: Snapshot, gpus: Mapping[str, Gpu], accept: str = OPENMETRICS) -> tuple[bytes, str]:
    """All metrics, and their content type: what the HTTP header ``accept`` asks for."""
    if OPENMETRICS in accept:
        whole: bytes = openmetrics.generate_latest(registry(snapshot, gpus, created=True))  # type: ignore[no-untyped-call]
        return whole, openmetrics.CONTENT_TYPE_LATEST
    # There each time of creation would be a series of its own, of no use to anybody.
    return prometheus_client.generate_latest(registry(snapshot, gpus)), "text/plain; version=0.0.4; charset=utf-8"


def registry(snapshot: Snapshot, gpus: Mapping[str, Gpu], created: bool = False) -> CollectorRegistry:
    """A registry with one snapshot in it. ``created``: counters say since when they count."""
    made = CollectorRegistry()
    made.register(_Collector(snapshot, gpus, created))
    return made


class _Collector:
    def __init__(self, snapshot: Snapshot, gpus: Mapping[str, Gpu], created: bool) -> None:
        self._snapshot = snapshot
        self._gpus = gpus
        self._created = created

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        page = Page(self._created)
        page.add("weightcache_build", (labels.clean(self._snapshot.version), platform.python_version()), 1)
        for view in self._snapshot.ranks:
            _rank(page, view, self._snapshot.at, self._gpus.get(view.status.gpu_uuid))
        for engine in self._snapshot.standby:
            _engine(page, engine)
        return page.filled()


def _rank(page: Page, view: RankView, now: float, gpu: Gpu | None) -> None:
    status = view.status
    key = (str(status.rank), str(gpu.index) if gpu else "", labels.clean(status.gpu_uuid))
    backend = labels.known(status.backend, ("cuda", "host"))
    bus, name = (gpu.bus, labels.clean(gpu.name)) if gpu else ("", "")
    page.add("weightcache_rank", (*key, backend, labels.clean(status.version), bus, name), 1)
    page.add("weightcache_agent_up", key, view.agent == "up")
    page.add("weightcache_rank_ready", key, view.agent == "up" and status.state == "ready")
    page.one_of("weightcache_rank_state", key, STATES, brief.state(view))
    if view.agent == "up":
        _condition(page, key, status)
        _sets(page, key, status)
        _use(page, key, status, now)
        _counters(page, key, status, view.heard_at)


def _engine(page: Page, engine: EngineView) -> None:
    name = labels.clean(engine.engine)
    page.add("weightcache_engine_parked", (name,), engine.parked)
    for slot in engine.slots:
        key = (name, labels.clean(slot.slot))
        page.one_of("weightcache_engine_role", key, ENGINE_ROLES, standby.role(slot))
        if slot.status:
            page.add("weightcache_engine_restarts", key, slot.status.restarts)
            for cause in CAUSES:
                page.add("weightcache_engine_promotions", (*key, cause), slot.status.promoted.get(cause, 0))
        if slot.last:
            page.add("weightcache_engine_last_promotion_seconds", key, slot.last.seconds)
            page.add("weightcache_engine_last_promotion_timestamp_seconds", key, slot.last.at)


def _condition(page: Page, key: tuple[str, ...], status: RankStatus) -> None:
    page.one_of("weightcache_rank_kept", key, KEPT, status.kept)
    if status.error:
        page.add("weightcache_rank_error", (*key, labels.known(status.error.code, CODES)), 1)
    if status.drained:
        page.add("weightcache_rank_drained_timestamp_seconds", key, status.drained.at)
    if progress := status.progress:
        page.add("weightcache_load_progress_seconds", key, progress.seconds)
        page.add("weightcache_load_progress_bytes", key, progress.bytes_done)
        if progress.bytes_total:
            page.add("weightcache_load_progress_size_bytes", key, progress.bytes_total)


def _sets(page: Page, key: tuple[str, ...], status: RankStatus) -> None:
    roles: dict[str, list[SetStatus]] = {}
    for entry in status.sets:
        roles.setdefault(labels.role(entry.role), []).append(entry)
    for role, sets in roles.items():
        of = (*key, role)
        newest = sets[-1]
        name, revision = labels.model(newest.model), labels.clean(newest.revision, labels.SHORT)
        version, digest = str(labels.number(newest.version)), labels.clean(newest.digest, labels.SHORT)
        page.add("weightcache_set", (*of, name, revision, version, digest), 1)
        page.add("weightcache_sets", of, len(sets))
        page.add("weightcache_set_bytes", of, sum(entry.bytes for entry in sets))
        page.add("weightcache_set_arenas", of, sum(entry.arenas for entry in sets))
        page.add("weightcache_set_tensors", of, sum(entry.tensors for entry in sets))
        page.add("weightcache_set_suspect", of, any(entry.suspect for entry in sets))
        page.add("weightcache_set_published_timestamp_seconds", of, newest.published_at)
        page.add("weightcache_set_load_seconds", of, newest.load_seconds)
        page.add("weightcache_set_load_bytes", of, newest.bytes_read)
        page.add("weightcache_leases", of, sum(len(entry.leases) + entry.unnamed for entry in sets))


def _use(page: Page, key: tuple[str, ...], status: RankStatus, now: float) -> None:
    page.add("weightcache_orphans", key, len(status.orphans))
    used = any(entry.leases or entry.unnamed for entry in status.sets)
    if last := now if used else status.measured.leased_at:
        page.add("weightcache_last_lease_timestamp_seconds", key, last)


def _counters(page: Page, key: tuple[str, ...], status: RankStatus, heard_at: float) -> None:
    """All that only grows until the agent is restarted; what did not happen is 0, so that the first time is seen."""
    measured, counts = status.measured, status.counts
    since = measured.started_at or max(heard_at - status.uptime_seconds, 0)
    page.add("weightcache_agent_start_time_seconds", key, since)
    for event in EVENTS:
        page.add("weightcache_events", (*key, event), counts.get(event, 0), since)
    for family, name, codes in (
        ("weightcache_refusals", "refused", REFUSALS),
        ("weightcache_verification_failures", "verification-failed", ("damaged",)),
    ):
        for code, count in _by_code(counts, name, codes).items():
            page.add(family, (*key, code), count, since)
    for source, result in LOADS:
        page.add("weightcache_loads", (*key, source, result), measured.loads.get(f"{source}:{result}", 0), since)
    for source in sorted({source for source, _ in LOADS}):
        count, total = measured.loads.get(f"{source}:published", 0), measured.load_seconds.get(source, 0.0)
        page.summary("weightcache_load_duration_seconds", (*key, source), count, total, since)
    if len(measured.attaches) == len(ATTACH_BOUNDS) + 1:  # else the agent is of another version
        name = "weightcache_attach_duration_seconds"
        page.histogram(name, key, ATTACH_BOUNDS, measured.attaches, measured.attach_seconds, since)


def _by_code(counts: Mapping[str, int], event: str, codes: tuple[str, ...]) -> dict[str, int]:
    """How often an event happened with each of ``codes``, and with all others together."""
    found = dict.fromkeys((*codes, OTHER), 0)
    for name, count in counts.items():
        kind, colon, code = name.partition(":")
        if colon and kind == event:
            found[labels.known(code, codes)] += count
    return found
