"""`wcache status`: what every rank of this host holds, and who uses it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from weightcache.cli import ranks, status_nodes, systemd
from weightcache.cli.parsing import Parser, add_global, add_rank
from weightcache.monitor import peers, words
from weightcache.monitor.site import find_ranks
from weightcache.monitor.view import RankView, plain, verdict
from weightcache.text import coloured, duration, escape, paint, size, table

if TYPE_CHECKING:
    import argparse

    from weightcache.cli.systemd import Units

DESCRIPTION = """\
Show the state of every rank of this host. A rank whose agent does not answer is shown as last known. Of a deployment on
several nodes, the others are shown as their exporters tell it (weightcache-exporter, with [exporter] listen at an
address that this host reaches); the exit status is about this host.

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
    others = peers.ask(site) if options.rank is None else ()
    down = [view.status.rank for view in views if view.agent == "down"]
    if options.json:
        of_nodes = {"nodes": [status_nodes.plain(peer) for peer in others]} if others else {}
        print(json.dumps({"schema": 1, "ranks": [plain(view) for view in views], **of_nodes}, indent=2))
    else:
        lines = _lines(views, systemd.of_ranks(site, down)) if views else []
        if others:
            lines = [status_nodes.title(site.node, site.config.deployment.nodes[site.node], here=True), *lines]
        for peer in others:
            lines += ["", *status_nodes.lines(peer)]
        if lines:
            print("\n".join(lines))
    return verdict(site, views)


def _lines(views: list[RankView], units: Units) -> list[str]:
    lines = table(HEADER, [_row(view) for view in views], RIGHT)
    if coloured(sys.stdout):
        for i, view in enumerate(views, 1):
            if colour := words.COLOURS.get(view.status.state):
                lines[i] = paint(lines[i], view.status.state, colour)
    for view in views:
        of_units = _unit_lines(view.status.rank, units) if view.agent != "up" else []
        lines += [f"rank {view.status.rank}: {line}" for line in words.details(view, time.time(), of_units)]
    return lines


def _row(view: RankView) -> tuple[str, ...]:
    status = view.status
    leases = sum(len(entry.leases) + entry.unnamed for entry in status.sets) + len(status.orphans)
    newest = max((entry.published_at for entry in status.sets), default=None)
    return (
        str(status.rank),
        words.state(view),
        escape(status.backend),
        escape(status.gpu_uuid) or "-",
        escape(status.model) or "-",
        str(len(status.sets)),
        size(sum(entry.bytes for entry in status.sets)),
        escape(status.kept) if status.sets else "-",
        str(leases),
        "-" if newest is None else duration(time.time() - newest),
    )


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
