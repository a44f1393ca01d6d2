"""`wcache metrics` and `wcache exporter`: the ranks of this host for Prometheus."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import weightcache
from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_rank
from weightcache.config_checks import parse_address
from weightcache.errors import ConfigError, UsageError
from weightcache.monitor import gpus
from weightcache.monitor.site import find_ranks
from weightcache.monitor.snapshot import Snapshot
from weightcache.monitor.standby import Standby
from weightcache.text import escape

if TYPE_CHECKING:
    from weightcache.monitor.site import Site

METRICS = """\
Print the metrics of all ranks once, in the OpenMetrics format. Agents that do not answer are metrics, too, and no
error. docs/operations.md says what each metric tells, and what to do then."""

EXPORTER = """\
Serve the metrics of all ranks of this host over HTTP until SIGTERM: GET /metrics for Prometheus, GET /status for
`wcache status` on the other nodes of a deployment, and GET /health, which is 200 while at least one agent answers. The
unit weightcache-exporter.service runs this."""

SUFFIX = ".prom"


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    parser = commands.add_parser("metrics", help="print the metrics of all ranks", description=METRICS)
    text = f"write them to FILE (which ends in {SUFFIX}) for node_exporter's textfile collector instead"
    parser.add_argument("--textfile", type=Path, metavar="FILE", help=text)
    add_rank(parser)
    add_global(parser)
    parser.set_defaults(run=_metrics, parser=parser)
    parser = commands.add_parser("exporter", help="serve the metrics of all ranks over HTTP", description=EXPORTER)
    text = "HOST:PORT or [IPV6]:PORT (default: exporter.listen of the configuration, or 127.0.0.1:9464)"
    parser.add_argument("--listen", type=_address, metavar="ADDRESS", help=text)
    add_global(parser)
    parser.set_defaults(run=_exporter, parser=parser)


def _metrics(options: argparse.Namespace) -> int:
    _require_client()
    from weightcache.monitor import metrics

    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    if options.textfile:
        _write(options.textfile, _observe(site, options.rank))
    else:
        text, _ = metrics.text(_observe(site, options.rank), gpus.find())
        sys.stdout.write(text.decode())
    return 0


def _observe(site: Site, rank: int | None) -> Snapshot:
    views = ranks.query_all(site, find_ranks(site) if rank is None else [rank])
    # Of one rank alone, so that files of several ranks do not have the same series.
    engines, problem = Standby(site.engines if rank is None else None).now()
    if problem:
        print(f"wcache: note: {escape(problem)}", file=sys.stderr)
    host, version = socket.gethostname(), weightcache.__version__
    return Snapshot(time.time(), host, version, "", problem, tuple(views), (), (), (), engines)


def _write(file: Path, snapshot: Snapshot) -> None:
    from prometheus_client import write_to_textfile

    from weightcache.monitor import metrics

    if file.suffix != SUFFIX:
        raise UsageError(f"node_exporter reads only files that end in {SUFFIX}, not {str(file)!r}")
    try:
        write_to_textfile(str(file), metrics.registry(snapshot, gpus.find()))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from None


def _exporter(options: argparse.Namespace) -> int:
    _require_client()
    from weightcache.monitor import exporter

    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    address = options.listen or parse_address(site.config.exporter.listen)
    exporter.run(site, address, lambda text: print(text, flush=True))
    return 0


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _require_client() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("metrics need prometheus_client, which this Python lacks: pip install 'weightcache[metrics]'")
