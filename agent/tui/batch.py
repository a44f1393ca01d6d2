"""wcache-top without a screen: a table, JSON, or either of them again and again."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache.monitor import table, view
from weightcache.monitor.snapshot import plain
from weightcache.text import coloured, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightcache.monitor.site import Site
    from weightcache.monitor.snapshot import Snapshot, Source


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints snapshots as JSON or as a table."""

    site: Site
    as_json: bool
    several: bool
    """Whether more than one follow each other: JSON is one line each then."""

    def show(self, snapshot: Snapshot) -> None:
        """Print one, at once. Raises OSError where nobody reads or nothing can be written."""
        if self.as_json:
            print(json.dumps(plain(snapshot), indent=None if self.several else 2), flush=True)
            return
        if found := table.lines(snapshot, coloured(sys.stdout)):
            print("\n".join(found) + ("\n" if self.several else ""), flush=True)
        if snapshot.problem:
            print(f"wcache-top: note: {escape(snapshot.problem)}", file=sys.stderr, flush=True)

    def once(self, snapshot: Snapshot) -> int:
        """Print one and return the exit status that says whether all is well. Raises what `wcache status` raises."""
        self.show(snapshot)
        return view.verdict(self.site, snapshot.ranks)

    def watch(self, first: Snapshot, source: Source, seconds: float, ended: Callable[[], bool]) -> int:
        """Print one every so many seconds until ``ended`` or interrupted."""
        last = first
        for last in _paced(first, source, seconds, ended):
            self.show(last)
        return view.verdict(self.site, last.ranks)


def _paced(first: Snapshot, source: Source, seconds: float, ended: Callable[[], bool]) -> Iterator[Snapshot]:
    due = time.monotonic()
    yield first
    while not ended():
        # What took too long is left out, not made up for.
        due = max(due + seconds, time.monotonic())
        time.sleep(max(due - time.monotonic(), 0))
        yield source.snapshot()
