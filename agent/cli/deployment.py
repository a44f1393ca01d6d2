"""`wcache ranks`: which ranks of the deployment are this host's, and on which GPUs."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from weightcache import placement
from weightcache.cli import ranks, systemd
from weightcache.cli.parsing import Parser, add_global
from weightcache.text import escape, table

if TYPE_CHECKING:
    from weightcache.config import RankConfig
    from weightcache.monitor.site import Site

DESCRIPTION = """\
Print the ranks of this host with their place in the deployment, their GPUs, sockets and units, as the configuration
says: agents are not asked. A layout that cannot be is refused, and so is a GPU that is not there.

Which node of deployment.nodes this host is says --node, else $WEIGHTCACHE_NODE_RANK, else the one entry that is this
host's name or one of its addresses."""

EPILOG = """\
example:
  systemctl enable --now $(wcache ranks --units)"""

HEADER = ("NODE", "RANK", "REPLICA", "PP", "TP", "GPU", "SOCKET", "UNIT")
RIGHT = ("NODE", "RANK", "REPLICA", "PP", "TP")


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    text = "which ranks are this host's, and on which GPUs"
    parser = commands.add_parser("ranks", help=text, description=DESCRIPTION, epilog=EPILOG)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1')
    how.add_argument("--units", action="store_true", help="print the units to enable, in one line")
    parser.options += ["--json", "--units"]
    parser.add_argument("--node", type=_node, metavar="N", help="this host is node N of the deployment, from 0")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print what the configuration says."""
    site = ranks.open_site(options)
    config = site.require_config()
    if site.lost:
        raise site.lost
    numbers = site.ranks if config.path else [entry.rank for entry in config.ranks]
    placed = placement.place_all(config, numbers, lambda: site.gpus)
    if options.units:
        print(" ".join(f"weightcache@{entry.rank}.socket" for entry in placed))
        return 0
    rows = [_row(site, entry) for entry in placed]
    if options.json:
        nodes = list(config.deployment.nodes)
        print(json.dumps({"schema": 1, "node": site.node, "nodes": nodes, "ranks": rows}, indent=2))
    else:
        cells = [tuple(escape(str(value)) or "-" for value in row.values()) for row in rows]
        print("\n".join(table(HEADER, cells, RIGHT)))
    return 0


def _row(site: Site, entry: RankConfig) -> dict[str, Any]:
    """One rank, in the order of HEADER."""
    deployment = site.config.deployment
    pp_rank, tp_rank = divmod(deployment.in_replica(entry.rank), deployment.tp_size)
    return {
        "node": site.node,
        "rank": entry.rank,
        "replica": deployment.replica_of(entry.rank),
        "pp_rank": pp_rank,
        "tp_rank": tp_rank,
        "gpu_uuid": entry.gpu,
        "socket": str(site.rank(entry.rank).public),
        "unit": systemd.service_name(entry.rank),
    }


def _node(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected the number of a node, from 0, not {text!r}")
    return int(text)
