"""One command for several ranks at the same time."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from weightcache.errors import WeightcacheError
from weightcache.monitor import site as sites, view as views
from weightcache.monitor.site import Site
from weightcache.monitor.view import RankView
from weightcache.text import escape

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")
Runner = Callable[["argparse.Namespace"], int]
Quiet = Callable[[], AbstractContextManager[None]]


def open_site(options: argparse.Namespace) -> Site:
    """The site that the global options name."""
    return sites.open_site(options.config, options.runtime_dir, getattr(options, "node", None))


def warn_of_config(site: Site) -> None:
    """Mention what is wrong with the configuration to an operator whose command works without it."""
    for problem in (site.problem, site.lost):
        if problem is not None:
            print(f"wcache: note: {escape(problem.message)}", file=sys.stderr)


def query_all(site: Site, ranks: list[int]) -> list[RankView]:
    """The state of several ranks, asked at the same time."""
    found = []
    for rank, result in each(ranks, lambda rank: views.query(site, rank)):
        if isinstance(result, Exception):
            raise result
        found.append((rank, result))
    return [view for _, view in sorted(found, key=lambda pair: pair[0])]


def each(ranks: Iterable[int], action: Callable[[int], T]) -> Iterator[tuple[int, T | Exception]]:
    """Run ``action`` for all ranks at the same time and yield results, or exceptions, as they come.

    The threads are daemons, so that Ctrl-C ends the command while an agent is still busy.
    """
    ranks = list(ranks)
    results: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()

    def run(rank: int) -> None:
        try:
            results.put((rank, action(rank)))
        except Exception as error:  # noqa: BLE001 - handed to the caller, not hidden
            results.put((rank, error))

    for rank in ranks:
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    for _ in ranks:
        yield results.get()


def report(ranks: list[int], action: Callable[[int], str], quiet: Quiet = contextlib.nullcontext) -> int:
    """Run ``action`` for all ranks, print its sentences or errors, and return the exit status (the lowest rank's).

    Everything is printed inside ``quiet()``. A single rank's error is raised.
    """
    failures = {}
    for rank, result in each(ranks, action):
        with quiet():
            if isinstance(result, str):
                # Agents may name their rank themselves.
                print(escape(result if result.startswith(f"rank {rank} ") else f"rank {rank}: {result}"), flush=True)
            elif isinstance(result, WeightcacheError) and len(ranks) > 1:
                print(f"wcache: rank {rank}: {escape(result.message)}", file=sys.stderr)
                failures[rank] = result.exit_status
            else:
                raise result
    return failures[min(failures)] if failures else 0
