"""A snapshot as plain text: a row a rank, and lines about each. What `wcache-top --once` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache.monitor import standby, words
from weightcache.monitor.ownership import Ownership, ownership
from weightcache.text import count, duration, escape, paint, size, table

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import Device, Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import LeaseStatus

HEADER = ("RANK", "STATE", "GPU", "MODEL", "WEIGHTS", "ENGINES", "OTHER", "FREE", "USERS", "REQS", "KEPT", "AGE")
RIGHT = ("RANK", "WEIGHTS", "ENGINES", "OTHER", "FREE", "USERS", "REQS", "AGE")
WIDTH = 120
SHORTEST_MODEL = 10


def lines(snapshot: Snapshot, colour: bool = False) -> list[str]:
    """The whole text, line by line. Rows are at most WIDTH characters wide where that is possible.

    WEIGHTS, ENGINES, OTHER and FREE split the memory of the rank's device.
    """
    return [*(_ranks(snapshot, colour) if snapshot.ranks else []), *standby.lines(snapshot.standby, snapshot.at)]


def _ranks(snapshot: Snapshot, colour: bool) -> list[str]:
    rows = [_row(snapshot, rank) for rank in snapshot.ranks]
    shown = table(HEADER, rows, RIGHT)
    if (excess := max(map(len, shown)) - WIDTH) > 0:
        place = HEADER.index("MODEL")
        room = max(max(len(row[place]) for row in rows) - excess, SHORTEST_MODEL)
        rows = [(*row[:place], _tail(row[place], room), *row[place + 1 :]) for row in rows]
        shown = table(HEADER, rows, RIGHT)
    if colour:
        for i, rank in enumerate(snapshot.ranks, 1):
            if name := words.COLOURS.get(rank.status.state):
                shown[i] = paint(shown[i], rank.status.state, name)
    for rank in snapshot.ranks:
        about = [*_memory(snapshot, rank), *_process_lines(snapshot, rank)]
        found = words.details(rank, snapshot.at)
        shown += [f"rank {rank.status.rank}: {line}" for line in (*found, *about)]
    return shown


def split(snapshot: Snapshot, device: Device) -> str:
    """Who owns a device's memory, in one line."""
    own = ownership(snapshot, device)
    index = f"GPU {device.index} " if device.index >= 0 else ""
    place = f"{index}{escape(device.name)} ({escape(device.uuid)})" if device.uuid else "this host"
    if not own.total:
        return f"memory of {place.strip()}: unknown"
    return (
        f"memory of {place.strip()}: {size(own.weights)} weights, {size(own.engines)} engines besides, "
        f"{size(own.other)} other, {size(own.free)} free of {size(own.total)}"
    )


def _row(snapshot: Snapshot, rank: RankView) -> tuple[str, ...]:
    status = rank.status
    device = _device(snapshot, rank)
    own = ownership(snapshot, device) if device and device.total else None
    leases = _leases(rank)
    newest = max((entry.published_at for entry in status.sets), default=None)
    return (
        str(status.rank),
        words.state(rank),
        _gpu(rank, device),
        escape(status.model) or "-",
        size(sum(entry.bytes for entry in status.sets)),
        *_parts(own),
        str(len({lease.pid for lease in leases})),
        _requests(snapshot, leases),
        escape(status.kept) if status.sets else "-",
        "-" if newest is None else duration(snapshot.at - newest),
    )


def _parts(own: Ownership | None) -> tuple[str, str, str]:
    return (size(own.engines), size(own.other), size(own.free)) if own else ("-", "-", "-")


def _device(snapshot: Snapshot, rank: RankView) -> Device | None:
    if rank.status.gpu_uuid or rank.status.backend == "host":
        return snapshot.device(rank.status.gpu_uuid)
    return None


def _gpu(rank: RankView, device: Device | None) -> str:
    """NVML's index, or as much of the UUID as tells slices apart."""
    uuid = rank.status.gpu_uuid
    if not uuid:
        return "host" if rank.status.backend == "host" else "-"
    return str(device.index) if device and device.index >= 0 else escape(uuid[:12])


def _requests(snapshot: Snapshot, leases: list[LeaseStatus]) -> str:
    """Running and waiting requests of all engines that say so. Ranks of one launch have the same server: see there."""
    engines = [engine for pid in {lease.pid for lease in leases} if (engine := snapshot.engine(pid))]
    known = [engine for engine in engines if engine.running is not None]
    if not known:
        return "-"
    return f"{sum(e.running or 0 for e in known)}+{sum(e.waiting or 0 for e in known)}"


def _memory(snapshot: Snapshot, rank: RankView) -> list[str]:
    device = _device(snapshot, rank)
    return [split(snapshot, device)] if device else []


def _process_lines(snapshot: Snapshot, rank: RankView) -> list[str]:
    """What each engine has besides the weights, and who else is on a GPU. The host's memory has too many users."""
    device = _device(snapshot, rank)
    own = {process.pid: process.bytes for process in device.processes} if device else {}
    pids = sorted({lease.pid for lease in _leases(rank)})
    found = []
    for pid in pids:
        parts = [f"{size(own[pid] or 0)} besides the weights"] if own.get(pid) is not None else []
        if (engine := snapshot.engine(pid)) is not None:
            if device is None or device.uuid:
                parts.append(f"{size(engine.resident)} of host memory")
            if engine.running is not None:
                parts.append(f"{count(engine.running, 'request')} running, {engine.waiting or 0} waiting")
        if parts:
            found.append(f"engine {pid} has {', '.join(parts)}")
    for process in device.processes if device else ():
        if process.pid not in pids:
            held = "an unknown part" if process.bytes is None else size(process.bytes)
            found.append(f"process {process.pid} has {held}: {escape(process.command) or 'unknown'}")
    return found


def _leases(rank: RankView) -> list[LeaseStatus]:
    return [*(lease for entry in rank.status.sets for lease in entry.leases), *rank.status.orphans]


def _tail(text: str, room: int) -> str:
    """The end of a path, which tells models apart."""
    return text if len(text) <= room else "..." + text[-(room - 3) :]
