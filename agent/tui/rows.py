"""The rows of the tables, made from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightcache.tui import slots, words
from weightcache.tui.attached import attached
from weightcache.tui.cells import Cell, safe
from weightcache.tui.widgets.columns import Column
from weightcache.tui.widgets.table import Row

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import RankEvent, Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import SetStatus

RANKS = (
    Column("RANK", right=True),
    Column("GPU", drop=3),
    Column("STATE"),
    Column("MODEL", least=20, tail=True),
    Column("WEIGHTS", drop=1, right=True),
    Column("CAPACITY", drop=5, right=True),
    Column("FREE", drop=4, right=True),
    Column("ENGINES", drop=2, right=True),
    Column("LAST LOAD", drop=6, right=True),
    Column("UPTIME", drop=7, right=True),
)
SETS = (
    Column("SET", most=16),
    Column("ROLE", most=20),
    Column("MODEL", least=12, tail=True),
    Column("REVISION", drop=6, most=12),
    Column("VERSION", drop=7, right=True),
    Column("FINGERPRINT", drop=3),
    Column("SIZE", right=True),
    Column("ARENAS", drop=9, right=True),
    Column("TENSORS", drop=8, right=True),
    Column("ENGINES", drop=1, right=True),
    Column("AGE", drop=2, right=True),
    Column("LOADED IN", drop=4, right=True),
)
ENGINES = (
    Column("ENGINE", right=True),
    Column("USER", drop=4, most=16),
    Column("UNIT", drop=1, most=32),
    Column("SET", drop=5, most=24),
    Column("COMMAND", least=20),
    Column("FOR", drop=3, right=True),
    Column("GPU MEMORY", drop=2, right=True),
    Column("HOST MEMORY", drop=8, right=True),
    Column("RUNNING", drop=6, right=True),
    Column("WAITING", drop=7, right=True),
)
EVENTS = (
    Column("TIME"),
    Column("RANK", right=True),
    Column("LEVEL", drop=2, most=10),
    Column("EVENT", drop=1, most=22),
    Column("TEXT", least=12),
)

Key = tuple[int, str]
"""A set or an engine: the rank's number with the set's id, or with the engine's pid."""


def ranks(snapshot: Snapshot, seconds: float) -> list[Row]:
    """One row a rank; ``seconds`` is the interval of the agents' answers."""
    return [_rank(snapshot, view, seconds) for view in snapshot.ranks]


def _rank(snapshot: Snapshot, view: RankView, seconds: float) -> Row:
    status = view.status
    known = view.heard_at > 0
    device = snapshot.device(status.gpu_uuid) if status.gpu_uuid or status.backend == "host" else None
    newest = max(status.sets, key=lambda entry: entry.published_at, default=None)
    up = view.agent == "up"
    cells = (
        Cell(str(status.rank), order=float(status.rank)),
        words.gpu(snapshot, status),
        words.state(view, snapshot.at, seconds),
        Cell(safe(status.model)) if status.model else words.NONE,
        words.bytes_of(sum(entry.bytes for entry in status.sets) if known else None),
        words.bytes_of(device.total if device else None),
        words.bytes_of(device.free if device else None),
        words.number(len(attached(status)) if known else None),
        words.known(newest.load_seconds if newest else None),
        words.known(status.uptime_seconds + snapshot.at - view.heard_at if up else None),
    )
    return Row(status.rank, cells, dim=not up or words.silent_for(view, snapshot.at, seconds) > 0)


def sets(snapshot: Snapshot, view: RankView) -> list[Row]:
    """The resident sets of a rank."""
    return [
        Row((view.status.rank, entry.id), _set(snapshot, entry), dim=view.agent != "up") for entry in view.status.sets
    ]


def _set(snapshot: Snapshot, entry: SetStatus) -> tuple[Cell, ...]:
    role = safe(entry.role)
    return (
        Cell(safe(entry.id)),
        Cell(f"{role}, suspect", "bad") if entry.suspect else Cell(role),
        Cell(safe(entry.model)),
        Cell(safe(entry.revision)) if entry.revision else words.NONE,
        words.number(entry.version),
        Cell(words.digest(entry)),
        words.bytes_of(entry.bytes),
        words.number(entry.arenas),
        words.number(entry.tensors),
        words.number(len({lease.pid for lease in entry.leases}) + entry.unnamed),
        words.known(snapshot.at - entry.published_at),
        words.known(entry.load_seconds),
    )


def engines(snapshot: Snapshot, view: RankView) -> list[Row]:
    """The engines of a rank, with those whose set is gone."""
    status = view.status
    device = snapshot.device(status.gpu_uuid)
    own = {process.pid: process.bytes for process in device.processes} if device else {}
    known = {engine.pid: engine for engine in snapshot.engines}
    slot_of = slots.of_process(snapshot)
    rows = []
    for one in attached(status):
        lease, more = one.lease, known.get(one.lease.pid)
        # A lease is the scheduler's, whose own title says little; the server's command line says which model and port.
        command = more.launch if more and more.launch else lease.command
        cells = (
            Cell(str(lease.pid), order=float(lease.pid)),
            Cell(words.user(lease.uid)),
            Cell(unit) if (unit := slot_of.get(lease.pid) or safe(lease.unit)) else words.NONE,
            Cell(one.uses, "busy" if one.orphan else ""),
            Cell(words.command(command)) if command else words.NONE,
            words.known(snapshot.at - lease.since),
            words.bytes_of(own.get(lease.pid)),
            words.bytes_of(more.resident if more else None),
            words.number(more.running if more else None),
            words.number(more.waiting if more else None),
        )
        rows.append(Row((status.rank, str(lease.pid)), cells, dim=view.agent != "up"))
    return rows


def events(happened: Sequence[RankEvent], at: float, rank: int | None) -> list[Row]:
    """Events, the latest first; those of other ranks than ``rank`` step back unless they are serious."""
    rows = []
    for one in reversed(happened):
        event = one.happened
        serious = words.level(event.level)
        style = serious.style if serious.style != "dim" else "" if one.rank == rank else "dim"
        cells = (
            Cell(words.clock(event.at, at), style, event.at),
            Cell(str(one.rank), style, float(one.rank)),
            serious,
            Cell(safe(event.event), style),
            Cell(safe(event.text), style),
        )
        rows.append(Row(event_key(one), cells))
    return rows


def event_key(one: RankEvent) -> tuple[int, float, int]:
    """What makes an event that event: serials begin anew with each agent."""
    return one.rank, one.happened.at, one.happened.serial
