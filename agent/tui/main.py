"""`wcache-top`: the screen, and the same for scripts. textual is imported only where there is a screen."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pwd
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import weightcache
from weightcache.cli import leave
from weightcache.cli.parsing import Parser, add_global, add_rank, as_path, unknown
from weightcache.client import AGENT_USER
from weightcache.errors import UsageError
from weightcache.monitor import site as sites, view
from weightcache.monitor.site import Site
from weightcache.monitor.snapshot import Snapshot, Source
from weightcache.tui.batch import Printer

DESCRIPTION = """\
Show the ranks of this host, who owns the memory of their GPUs, the engines attached, and what happens.
Reads only: nothing is loaded, and no agent is started by looking at it."""

EPILOG = """\
keys:
  q quit   ? help   / filter   s sort   Enter details   Esc back   Space pause   + - interval   0-9 rank
  c compare fingerprints   l journal of the unit   e evict   d drain (both ask first)   ctrl+p palette

without a screen (--once, --json, no terminal), exit status:
  0   every rank is ready
  1   some rank is not ready
  75  some rank is loading, and all others are ready
  69  no agent answers at all
  2   the command line makes no sense, a recording that exists or cannot be read included
  130 interrupted     141 nobody reads the output any more"""

INTERVALS = (0.25, 60.0)
DEFAULT_INTERVAL = 1.0
FIRST_ANSWERS_SECONDS = view.ANSWER_SECONDS + 1.0
FIRST_REQUESTS_SECONDS = 0.6
"""How long a single look waits for the engines' own servers."""


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="wcache-top", description=DESCRIPTION, epilog=EPILOG)
    top.add_argument("--interval", type=_interval, default=DEFAULT_INTERVAL, metavar="SECONDS", help=_INTERVAL_HELP)
    add_rank(top)
    top.add_argument("--once", action="store_true", help="print a table and leave")
    top.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1 and leave')
    top.add_argument(
        "--watch",
        type=_interval,
        metavar="SECONDS",
        help="with --json: one JSON line every so many seconds; with --once: the table again and again",
    )
    top.add_argument("--record", type=as_path, metavar="FILE", help="also write all that is shown to a new file")
    top.add_argument("--replay", type=as_path, metavar="FILE", help="show a recording instead of this host")
    top.add_argument("--speed", type=_speed, default=1.0, metavar="FACTOR", help="of a replay (default: 1)")
    top.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    top.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    top.add_argument("--readonly", action="store_true", help="neither evict nor drain, also where this user may")
    add_global(top, top=True)
    version = f"weightcache {weightcache.__version__}"
    top.add_argument("--version", action="version", version=version, help="print the version and leave")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run wcache-top and return its exit status."""
    return leave.orderly("wcache-top", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    top = parser()
    try:
        options, extra = top.parse_known_args(argv)
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    if extra:
        raise unknown(extra, top)
    if options.watch is not None and not (options.json or options.once):
        raise UsageError("--watch goes with --json (JSON lines) or --once (tables); see wcache-top --help")
    if options.once and options.json:
        raise UsageError("--once prints a table, --json JSON: choose one")
    if options.replay and (options.record or options.rank is not None):
        raise UsageError("--replay shows a recording as it is: without --record and --rank")
    try:
        return _show(options)
    except ModuleNotFoundError as error:
        if (error.name or "weightcache").startswith("weightcache"):
            raise
        raise UsageError(
            f"the package {(error.name or '').partition('.')[0]} is not installed: pip install 'weightcache[top]' "
            "(--once and --json need only psutil)"
        ) from None


def _show(options: argparse.Namespace) -> int:
    site = sites.open_site(options.config, options.runtime_dir)
    batch = options.once or options.json
    if not batch and not _has_screen():
        print("wcache-top: no terminal here, so this is what --once shows", file=sys.stderr)
        batch = True
    with ExitStack() as stack:
        look = _replayed(options, stack) if options.replay else _living(options, site, batch, stack)
        if batch:
            printer = Printer(site, options.json, options.watch is not None)
            if options.watch is None:
                return printer.once(look.first())
            return printer.watch(look.first(), look.source, options.watch, look.ended)
        from weightcache.tui.app import Top

        readonly = bool(options.readonly or options.replay) or not may_operate(site)
        where = None if options.replay else site
        shown = Top(look.source, site=where, interval=options.interval, ascii=options.ascii, readonly=readonly)
        shown.run(mouse=not options.no_mouse)
        status: int = shown.return_code or 0
    return status


class _Look(NamedTuple):
    """A source, what a look without a screen begins with, and whether nothing more will come."""

    source: Source
    first: Callable[[], Snapshot]
    ended: Callable[[], bool]


def _replayed(options: argparse.Namespace, stack: ExitStack) -> _Look:
    from weightcache.monitor.replay import Replay

    replay = Replay(options.replay, options.speed)
    stack.callback(replay.close)
    return _Look(replay, replay.last if options.watch is None else replay.snapshot, lambda: replay.ended)


def _living(options: argparse.Namespace, site: Site, batch: bool, stack: ExitStack) -> _Look:
    from weightcache.monitor.gather import Gathering
    from weightcache.monitor.host import Host
    from weightcache.monitor.live import Live
    from weightcache.monitor.recording import Recorded, Recorder

    recorder = Recorder(options.record) if options.record else None
    seconds = options.watch or options.interval
    live = Live(site, options.rank, seconds, Host(Gathering(FIRST_REQUESTS_SECONDS if batch else 0.0), seconds))
    if recorder is None:
        stack.callback(live.close)
        return _Look(live, lambda: live.first(FIRST_ANSWERS_SECONDS), lambda: False)
    recorded = Recorded(live, recorder, seconds)

    def end() -> None:
        recorded.close()
        if recorded.problem is not None:
            raise recorded.problem

    stack.callback(end)
    return _Look(recorded, lambda: recorded.note(live.first(FIRST_ANSWERS_SECONDS)), lambda: bool(recorded.problem))


def may_operate(site: Site) -> bool:
    """Whether agents would obey this user: root, their own, or that of the packages."""
    owners = {0}
    with contextlib.suppress(KeyError):
        owners.add(pwd.getpwnam(AGENT_USER).pw_uid)
    for rank in sites.find_ranks(site):
        with contextlib.suppress(OSError):
            owners.add(site.rank(rank).status.stat().st_uid)
    return os.geteuid() in owners


def _has_screen() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


_INTERVAL_HELP = f"look so often, {INTERVALS[0]:g} to {INTERVALS[1]:g} (default: {DEFAULT_INTERVAL:g})"


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if INTERVALS[0] <= (value := float(text)) <= INTERVALS[1]:
            return value
    raise argparse.ArgumentTypeError(f"expected {INTERVALS[0]:g} to {INTERVALS[1]:g} seconds, not {text!r}")


def _speed(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and 0 < value <= 10_000:
            return value
    raise argparse.ArgumentTypeError(f"expected a factor above 0, not {text!r}")
