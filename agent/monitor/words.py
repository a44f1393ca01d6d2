"""What is known of a rank in lines for people: the same ones from `wcache status` and `wcache-top --once`.

``now`` is the moment that ages are told against, in seconds since the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache.text import count, duration, escape, moment, progress, size, user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.monitor.view import RankView
    from weightcache.protocol import LeaseStatus, Refusal, SetStatus

COLOURS = {"ready": "green", "loading": "yellow", "drained": "yellow", "failed": "red", "degraded": "red"}
"""Of the states; text.paint knows these names."""


def why_down(view: RankView) -> str:
    """Why there is no answer. An agent that refuses this user, or speaks another protocol, is not down."""
    return "down" if view.agent == "down" else "not to be asked"


def state(view: RankView) -> str:
    """The state, with what makes it doubtful."""
    known = escape(view.status.state)
    return known if view.agent == "up" else f"{known} ({why_down(view)})"


def details(view: RankView, now: float, units: Sequence[str] = ()) -> list[str]:
    """Lines about a rank. ``units`` are those about the units of one that is down."""
    status = view.status
    lines = []
    if view.agent != "up":
        known = f"last known {duration(now - view.heard_at)} ago" if view.heard_at else "nothing known"
        lines.append(f"agent {why_down(view)}, {known}: {escape(view.reason.message if view.reason else '')}")
        lines += units
    elif status.sets and status.kept == "lost":
        lines.append("NOT safe from a crash: the service manager does not hold the descriptors (`wcache doctor`)")
    for entry in status.sets:
        lines.append(set_line(entry))
        if entry.suspect:
            lines.append(f"  suspect, and being examined: {escape(entry.suspect)}")
        lines += [f"  {lease_line(lease, now)}" for lease in entry.leases]
        if entry.unnamed:
            lines.append(f"  and {count(entry.unnamed, 'engine')} more")
    lines += [f"engine of a set that is gone: {lease_line(lease, now)}" for lease in status.orphans]
    lines += [refusal_line(refusal, now) for refusal in status.refusals[-1:]]
    if status.progress is not None:
        lines.append(f"loading: {progress(status.progress)}")
    if status.drained is not None:
        lines.append(f"drained by {user(status.drained.uid)} at {moment(status.drained.at)}; `wcache resume` ends it")
    if status.error is not None and not (view.reason and status.error.message == view.reason.message):
        label = status.state if status.state in ("failed", "degraded") else "error"
        lines.append(f"{label}: {escape(status.error.message)} [{escape(status.error.code)}]")
    return lines


def set_line(entry: SetStatus) -> str:
    """One weight set."""
    revision = f" revision {escape(entry.revision)}" if entry.revision else ""
    return (
        f"set {escape(entry.id)} ({escape(entry.role)}, version {entry.version}) of {escape(entry.model)}{revision}: "
        f"{count(entry.tensors, 'tensor')}, {size(entry.bytes)} in {count(entry.arenas, 'arena')}, "
        f"loaded in {duration(entry.load_seconds)} at {moment(entry.published_at)}"
    )


def refusal_line(refusal: Refusal, now: float) -> str:
    """One engine that was refused."""
    ago = duration(now - refusal.at)
    return f"refused {ago} ago: engine {refusal.pid} ({user(refusal.uid)}): {escape(refusal.message)}"


def lease_line(lease: LeaseStatus, now: float) -> str:
    """One attached engine."""
    unit = f", {escape(lease.unit)}" if lease.unit else ""
    return f"engine {lease.pid} ({user(lease.uid)}{unit}) for {duration(now - lease.since)}: {escape(lease.command)}"
