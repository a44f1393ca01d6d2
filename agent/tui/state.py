"""What all screens share: the latest snapshot and how it is to be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from weightcache import text
from weightcache.tui.cells import Cell, Line, Marks, clip, fold, pad, safe

if TYPE_CHECKING:
    from weightcache.monitor.site import Site
    from weightcache.monitor.snapshot import Snapshot
    from weightcache.monitor.view import RankView

STEPS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Intervals in seconds that + and - choose from."""

PROBLEM_LINES = 2


@dataclass
class State:
    """``seconds`` is the interval, ``clock`` tells the time; without a ``site`` this is a replay."""

    snapshot: Snapshot
    seconds: float
    marks: Marks
    clock: Callable[[], float]
    site: Site | None
    readonly: bool
    paused: bool = False

    def view(self, rank: int | None) -> RankView | None:
        """What is known of a rank."""
        return next((view for view in self.snapshot.ranks if view.status.rank == rank), None)

    def step(self, by: int) -> float:
        """The next interval of STEPS above (1) or below (-1) the present one."""
        if by > 0:
            return next((step for step in STEPS if step > self.seconds), STEPS[-1])
        return next((step for step in reversed(STEPS) if step < self.seconds), STEPS[0])

    def why_no_actions(self) -> str:
        """Why agents cannot be asked for anything, in one sentence; empty where they can."""
        if self.site is None:
            return "this is a replay: there is no agent to ask"
        return "wcache-top is read-only here (wcache-top --help says why)" if self.readonly else ""

    def header(self, width: int) -> list[Line]:
        """Host, versions, age of the data; and what is wrong with the whole, if anything."""
        shown = self.snapshot
        driver = f"driver {safe(shown.driver)}" if shown.driver else "no NVIDIA driver"
        left = [f"wcache-top on {safe(shown.host)}", driver, f"weightcache {safe(shown.version)}"]
        right = [self._age(), f"every {self.seconds:g} s"]
        # What is said last goes first, so that the age of the data stays.
        while len(left) + len(right) > 2 and cell_len("  ".join(left + right)) > width:
            (left if len(left) > 1 else right).pop()
        told = clip("  ".join(right), width, self.marks)
        room = max(width - len(told) - 2, 0)
        line = [
            Cell(pad(clip("  ".join(left), room, self.marks), width - len(told)), "strong"),
            Cell(told, "busy" if self.paused else "dim"),
        ]
        problem = fold(f"problem: {safe(shown.problem)}", width)[:PROBLEM_LINES] if shown.problem else []
        return [line, *([Cell(part, "busy")] for part in problem)]

    def _age(self) -> str:
        shown = self.snapshot
        if self.site is None:
            return f"{'PAUSED' if self.paused else 'replay'} at {text.moment(shown.at)}"
        if self.paused:
            return f"PAUSED, data {_whole(self.clock() - shown.at)} old"
        heard = [view.heard_at for view in shown.ranks if view.agent == "up"]
        return f"data {_whole(shown.at - min(heard))} old" if heard else "no agent answers"


def _whole(seconds: float) -> str:
    # Tenths would be drawn anew every second for nobody.
    return f"{max(seconds, 0):.0f} s" if seconds < 10 else text.duration(seconds)
