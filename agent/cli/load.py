"""`wcache load`: load the configured model now, and show how far it is."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

from weightcache import protocol
from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_rank, add_wait
from weightcache.client import Conversation
from weightcache.monitor.site import choose_ranks
from weightcache.monitor.view import ANSWER_SECONDS
from weightcache.text import progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from weightcache.protocol import LoadProgress

DESCRIPTION = """\
Load the configured model into every rank that does not hold it, and wait until it is resident. Ctrl-C ends the
waiting, never the load."""

GRACE_SECONDS = 10.0
LINE_SECONDS = 10.0
"""Without a terminal, a line is printed when the phase changes and otherwise this often."""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser("load", help="load the configured model now", description=DESCRIPTION)
    add_rank(parser)
    add_wait(
        parser,
        "how long to wait for the load; 0 only starts it, with exit status 75 (default: loader.timeout_seconds)",
        None,
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="also where it is resident: what nobody uses is replaced, what engines use goes with the last of them",
    )
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Ask all ranks at the same time: the ranks of one launch load together, and the first of them leads."""
    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    chosen = choose_ranks(site, options.rank)
    wait = site.config.loader.timeout_seconds if options.wait is None else options.wait
    display = Display()

    def load(rank: int, again: bool = False) -> str:
        with Conversation(site.rank(rank).public, ANSWER_SECONDS) as agent:
            request, answer = protocol.Load(wait, again), protocol.Loaded
            loaded = agent.request(request, answer, wait + GRACE_SECONDS, lambda now: display.update(rank, now))
        return f"ready, set {loaded.set_id}"

    if not options.again:
        return ranks.report(chosen, load, display.quiet)
    deployment = site.config.deployment
    leaders = sorted({deployment.launch_of(rank)[0] if rank in deployment.ranks else rank for rank in chosen})
    failed = ranks.report(leaders, lambda rank: load(rank, again=True), display.quiet)
    others = [rank for rank in chosen if rank not in leaders]
    return failed or (ranks.report(others, load, display.quiet) if others else 0)


class Display:
    """Progress of several ranks: one line that is written over on a terminal, plain lines elsewhere.

    ``update`` is called by the threads that talk to the agents.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[int, LoadProgress] = {}
        self._printed: dict[int, tuple[str, float]] = {}
        self._tty = sys.stdout.isatty()
        self._shown = False

    def update(self, rank: int, now: LoadProgress) -> None:
        """Show where one rank's load stands."""
        with self._lock:
            self._latest[rank] = now
            if self._tty:
                line = " | ".join(f"rank {rank}: {progress(self._latest[rank])}" for rank in sorted(self._latest))
                width = shutil.get_terminal_size().columns - 1
                # One write, carriage return first: whatever comes next starts by writing over it.
                print(f"\r{line[:width]}\x1b[K", end="", flush=True)
                self._shown = True
                return
            phase, at = self._printed.get(rank, ("", 0.0))
            if now.phase != phase or time.monotonic() - at >= LINE_SECONDS:
                self._printed[rank] = (now.phase, time.monotonic())
                print(f"rank {rank}: {progress(now)}", flush=True)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Make room for a line that stays, and show nothing until it is printed."""
        with self._lock:
            if self._shown:
                print("\r\x1b[K", end="", flush=True)
                self._shown = False
            yield
