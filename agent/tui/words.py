"""What the screens call things: states, devices, holders, ages. All of it is safe to show."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from weightcache import text
from weightcache.tui.cells import Cell, safe

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import Device, Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import LeaseStatus, RankStatus, SetStatus

QUIET_SECONDS = 12.0
"""An agent says something every 10 s."""

SHORT_DIGEST = 8
NONE = Cell("-", "dim")

_STYLES = {"ready": "good", "loading": "busy", "drained": "busy", "failed": "bad", "degraded": "bad", "empty": ""}
_LEVELS = {"warning": "busy", "error": "bad", "critical": "bad"}

user = functools.lru_cache(1024)(text.user)
"""Looked up once each: a directory service may take its time."""


def silent_for(view: RankView, at: float, seconds: float) -> float:
    """For how many seconds an agent that is up has said nothing, 0 as long as that means nothing.

    ``seconds`` is the interval it was asked to keep.
    """
    age = at - view.heard_at
    return age if view.agent == "up" and age > max(QUIET_SECONDS, seconds + 2) else 0.0


def state(view: RankView, at: float, seconds: float) -> Cell:
    """The state of a rank in a few words."""
    status = view.status
    known = text.duration(at - view.heard_at)
    if view.agent == "closed":
        return Cell("closed", "bad")
    if view.agent == "down":
        if not view.heard_at:
            return Cell("down", "bad")
        # Someone stopped it, and it had the time to say so.
        if status.state == "stopped":
            return Cell(f"stopped {known} ago", "busy")
        return Cell(f"down, last known {known} ago", "bad")
    if silent_for(view, at, seconds):
        return Cell(f"no answer for {known}", "bad")
    if status.state == "loading":
        return Cell(_loading(status), "busy")
    if status.sets and status.kept == "lost":
        return Cell(f"{safe(status.state)}, unsafe", "bad")
    return Cell(safe(status.state), _STYLES.get(status.state, ""))


def _loading(status: RankStatus) -> str:
    now = status.progress
    if now is None:
        return "loading"
    if now.bytes_total > 0 and now.bytes_done > 0:
        return f"loading {min(100 * now.bytes_done // now.bytes_total, 100)} %"
    return f"loading: {safe(now.phase)}"


def notes(view: RankView, at: float, seconds: float) -> list[Cell]:
    """What an operator ought to know about a rank beside its numbers, one sentence each."""
    status = view.status
    found = []
    if view.agent != "up":
        reason = f": {safe(view.reason.message)}" if view.reason else ""
        word = "cannot be asked" if view.agent == "closed" else "is down"
        known = f"last known {text.duration(at - view.heard_at)} ago as {safe(status.state)}"
        found.append(Cell(f"the agent {word}, {known if view.heard_at else 'nothing is known'}{reason}", "bad"))
    elif quiet := silent_for(view, at, seconds):
        found.append(Cell(f"no answer for {text.duration(quiet)}: everything below is as old", "bad"))
    elif status.sets and status.kept == "lost":
        found.append(
            Cell("not safe from a crash: the service manager does not hold the descriptors (wcache doctor)", "bad")
        )
    found += [
        Cell(f"set {safe(entry.id)} is suspect, and being examined: {safe(entry.suspect)}", "bad")
        for entry in status.sets
        if entry.suspect
    ]
    if status.progress is not None:
        found.append(Cell(f"loading: {safe(text.progress(status.progress))}", "busy"))
    if status.drained is not None:
        who = f"drained by {user(status.drained.uid)} at {text.moment(status.drained.at)}"
        found.append(Cell(f"{who}; wcache resume ends it", "busy"))
    if orphans := {lease.pid for lease in status.orphans}:
        pids = ", ".join(map(str, sorted(orphans)))
        found.append(Cell(f"{text.count(len(orphans), 'engine')} of a set that is gone: pid {pids}", "busy"))
    if status.error is not None and not (view.reason and view.reason.message == status.error.message):
        label = safe(status.state) if status.state in ("failed", "degraded") else "error"
        found.append(Cell(f"{label}: {safe(status.error.message)} [{safe(status.error.code)}]", "bad"))
    return found


def holders(status: RankStatus) -> str:
    """Who holds the weights, which nvidia-smi shows under no process."""
    if not status.sets:
        return ""
    users = len({lease.pid for entry in status.sets for lease in entry.leases})
    users += max(entry.unnamed for entry in status.sets)  # an engine leases one set of each role
    mapped = f"mapped by {text.count(users, 'engine')}" if users else "no process owns them"
    held = {
        "store": "agent and service manager's store",
        "process": "the agent alone",
        "lost": "the agent alone, lost by the service manager's store",
    }.get(status.kept, safe(status.kept))
    return f"weights held by {held}; {mapped}"


def gpu(snapshot: Snapshot, status: RankStatus) -> Cell:
    """A device as index and beginning of its UUID; the index sorts."""
    if not status.gpu_uuid:
        return Cell("host", order=-1.0) if status.backend == "host" else NONE
    device = snapshot.device(status.gpu_uuid)
    index = device.index if device else -1
    return Cell(f"{index} {short(status.gpu_uuid)}" if index >= 0 else short(status.gpu_uuid), order=float(index))


def device_name(device: Device) -> str:
    """A device in words."""
    name = safe(device.name)
    if not device.uuid:
        return name or "host memory"
    return f"GPU {device.index} {name}" if device.index >= 0 else name


def short(uuid: str) -> str:
    """Enough of a UUID to tell it from its neighbours."""
    return safe(uuid[:12])


def digest(entry: SetStatus) -> str:
    """The beginning of a set's fingerprint."""
    return safe(entry.digest[:SHORT_DIGEST])


def clock(epoch: float, at: float) -> str:
    """A time of day, with its date unless that is today's."""
    when = text.moment(epoch)
    return when[11:] if when[:10] == text.moment(at)[:10] else when


def level(name: str) -> Cell:
    """How serious an event is, in a word and a colour."""
    return Cell(safe(name), _LEVELS.get(name, "dim"))


def known(seconds: float | None) -> Cell:
    """A duration that sorts; a dash for None."""
    return NONE if seconds is None else Cell(text.duration(seconds), order=seconds)


def bytes_of(count: int | None) -> Cell:
    """A size that sorts; a dash for None."""
    return NONE if count is None else Cell(text.size(count), order=float(count))


def number(count: int | None) -> Cell:
    """A number that sorts; a dash for None."""
    return NONE if count is None else Cell(str(count), order=float(count))


def command(line: str) -> str:
    """A command line without the directory of its program: there is little room, and more to tell it by."""
    program, blank, rest = line.partition(" ")
    return safe(program.rpartition("/")[2] + blank + rest)


def engine(lease: LeaseStatus) -> str:
    """An engine in one phrase."""
    unit = f", {safe(lease.unit)}" if lease.unit else ""
    return f"engine {lease.pid} ({user(lease.uid)}{unit})"
