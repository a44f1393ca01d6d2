"""`wcache status`: what every rank of this host holds, and who uses it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from weightcache.cli import ranks, systemd
from weightcache.cli.parsing import Parser, add_global, add_rank
from weightcache.monitor.site import find_ranks
from weightcache.monitor.view import RankView, plain, verdict
from weightcache.text import coloured, count, duration, escape, moment, paint, progress, size, table, user

if TYPE_CHECKING:
    import argparse

    from weightcache.cli.systemd import Units
    from weightcache.protocol import LeaseStatus, Refusal, SetStatus

DESCRIPTION = """\
Show the state of every rank of this host. A rank whose agent does not answer is shown as last known.

states: empty, loading, ready, drained (by an operator), failed (the last load, or the configuration),
degraded (the resident bytes failed verification); without an agent: stopped, or the state before it went away, or
unknown.

kept, who holds the weights besides the engines: store (the agent, and systemd or the keeper: they outlive a crash of
the agent), process (the agent alone), lost (the agent alone for now; `wcache doctor` says why)."""

EPILOG = """\
exit status:
  0   every rank is ready
  1   some rank is not ready
  75  some rank is loading, and all others are ready
  69  no agent answers at all"""

HEADER = ("RANK", "STATE", "BACKEND", "GPU", "MODEL", "SETS", "SIZE", "KEPT", "ENGINES", "AGE")
RIGHT = ("RANK", "SETS", "SIZE", "ENGINES", "AGE")
COLOURS = {"ready": "green", "loading": "yellow", "drained": "yellow", "failed": "red", "degraded": "red"}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status", help="what every rank holds and who uses it", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1')
    add_rank(parser)
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the states and say by the exit status whether all is well."""
    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    views = ranks.query_all(site, find_ranks(site) if options.rank is None else [options.rank])
    down = [view.status.rank for view in views if view.agent == "down"]
    if options.json:
        print(json.dumps({"schema": 1, "ranks": [plain(view) for view in views]}, indent=2))
    elif views:
        print("\n".join(_lines(views, systemd.of_ranks(site, down))))
    return verdict(site, views)


def _lines(views: list[RankView], units: Units) -> list[str]:
    lines = table(HEADER, [_row(view) for view in views], RIGHT)
    if coloured(sys.stdout):
        for i, view in enumerate(views, 1):
            if colour := COLOURS.get(view.status.state):
                lines[i] = paint(lines[i], view.status.state, colour)
    for view in views:
        lines += [f"rank {view.status.rank}: {line}" for line in _details(view, units)]
    return lines


def _row(view: RankView) -> tuple[str, ...]:
    status = view.status
    leases = sum(len(entry.leases) for entry in status.sets) + len(status.orphans)
    newest = max((entry.published_at for entry in status.sets), default=None)
    return (
        str(status.rank),
        escape(status.state) if view.agent == "up" else f"{escape(status.state)} ({_why_down(view)})",
        escape(status.backend),
        escape(status.gpu_uuid) or "-",
        escape(status.model) or "-",
        str(len(status.sets)),
        size(sum(entry.bytes for entry in status.sets)),
        escape(status.kept) if status.sets else "-",
        str(leases),
        "-" if newest is None else duration(time.time() - newest),
    )


def _why_down(view: RankView) -> str:
    # An agent that refuses this user, or speaks another protocol, is not down.
    return "down" if view.agent == "down" else "not to be asked"


def _details(view: RankView, units: Units) -> list[str]:
    status = view.status
    lines = []
    if view.agent != "up":
        known = f"last known {duration(time.time() - view.heard_at)} ago" if view.heard_at else "nothing known"
        lines.append(f"agent {_why_down(view)}, {known}: {escape(view.reason.message if view.reason else '')}")
        lines += _unit_lines(status.rank, units)
    elif status.sets and status.kept == "lost":
        lines.append("NOT safe from a crash: the service manager does not hold the descriptors (`wcache doctor`)")
    for entry in status.sets:
        lines.append(_set_line(entry))
        if entry.suspect:
            lines.append(f"  suspect, and being examined: {escape(entry.suspect)}")
        lines += [f"  {_lease_line(lease)}" for lease in entry.leases]
    lines += [f"engine of a set that is gone: {_lease_line(lease)}" for lease in status.orphans]
    lines += [_refusal_line(refusal) for refusal in status.refusals[-1:]]
    if status.progress is not None:
        lines.append(f"loading: {progress(status.progress)}")
    if status.drained is not None:
        lines.append(f"drained by {user(status.drained.uid)} at {moment(status.drained.at)}; `wcache resume` ends it")
    if status.error is not None and not (view.reason and status.error.message == view.reason.message):
        label = status.state if status.state in ("failed", "degraded") else "error"
        lines.append(f"{label}: {escape(status.error.message)} [{escape(status.error.code)}]")
    return lines


def _unit_lines(rank: int, units: Units) -> list[str]:
    """Whether anything starts the agent of a rank that is down."""
    service, listener = units.service(rank), units.socket(rank)
    if service is None or listener is None:
        return []
    if service["ActiveState"] != "inactive":
        gone = "" if service.number("NFileDescriptorStore") else ", and systemd keeps no weights for it"
        return [f"{service.name} is {service.state}{gone}"]
    if listener.active:
        return [f"{service.name} is not running; {listener.name} listens, so the next attach starts it"]
    return [f"{service.name} and its socket are stopped: nothing starts it but `systemctl start {listener.name}`"]


def _set_line(entry: SetStatus) -> str:
    revision = f" revision {escape(entry.revision)}" if entry.revision else ""
    return (
        f"set {escape(entry.id)} ({escape(entry.role)}, version {entry.version}) of {escape(entry.model)}{revision}: "
        f"{count(entry.tensors, 'tensor')}, {size(entry.bytes)} in {count(entry.arenas, 'arena')}, "
        f"loaded in {duration(entry.load_seconds)} at {moment(entry.published_at)}"
    )


def _refusal_line(refusal: Refusal) -> str:
    ago = duration(time.time() - refusal.at)
    return f"refused {ago} ago: engine {refusal.pid} ({user(refusal.uid)}): {escape(refusal.message)}"


def _lease_line(lease: LeaseStatus) -> str:
    unit = f", {escape(lease.unit)}" if lease.unit else ""
    held = duration(time.time() - lease.since)
    return f"engine {lease.pid} ({user(lease.uid)}{unit}) for {held}: {escape(lease.command)}"
