"""Where the time of one start went: every moment until the server was ready belongs to one phase.

At each moment one process is the one that the start waits for: a scheduler from its beginning until it is ready, the
last of them to get ready where there are several; before and after that the process that started it. The moment
belongs to that process's innermost phase. So the phases of a start add up to its length, whatever runs beside them.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from weightcache.starts.reading import READY, SERVING, WARM_UP_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightcache.starts.reading import Process, Span, Start

Value = TypeVar("Value")

LAUNCHER = "launcher"
FAILED = "failed attempt"
OTHER = "other"
GROUPS = {
    "decode graph": "graphs", "prefill graph": "graphs", "graph": "graphs", "attention": "other", "scheduler": "other",
    "waiting": "other", "spawn": "other", "detokenizer": "other", "controller": "other", "model worker": "other",
    "model config": "other", "disaggregation": "other",
}  # fmt: skip
"""The phase that people read for one that is marked; others are their own."""


def length(start: Start) -> float | None:
    """Seconds until the server was ready; None if it never was."""
    return start.point(SERVING)


def phases(start: Start) -> dict[str, float]:
    """Seconds of each phase, in the order in which they began; empty for a start that never got ready."""
    until = length(start)
    if until is None or start.header is None:
        return {}
    origin = start.header.began
    chain = _chain(start)
    waits = _Sweep((process.began, _released(process), (-place,), place) for place, process in enumerate(chain))
    inner = [_Sweep(_named(process)) for process in chain]
    found: dict[str, float] = {}
    for begin, end in pairwise(sorted({origin, origin + until, *_edges(start, chain, origin, origin + until)})):
        name = _before(start, begin)
        if not name:
            place = waits.at(begin)
            name = LAUNCHER if place is None else inner[place].at(begin) or OTHER
        found[name] = found.get(name, 0.0) + end - begin
    return found


def waited_for(start: Start) -> Process | None:
    """The scheduler that was ready last in the last attempt."""
    last = max(1, len(start.attempts))
    ranks = [process for process in start.processes if process.role == "scheduler" and process.attempt == last]
    return max(ranks, key=lambda process: process.points.get(READY, float("inf")), default=None)


def _chain(start: Start) -> list[Process]:
    """From the server's main process to the scheduler that is waited for."""
    last = max(1, len(start.attempts))
    own = [process for process in start.processes if process.attempt == last]
    mains = [process for process in own if process.role in ("main", "controller")]
    rank = waited_for(start)
    return [*mains, *([rank] if rank else [])]


def _edges(start: Start, chain: list[Process], low: float, high: float) -> list[float]:
    moments = list(start.attempts)
    for process in chain:
        moments += [process.began, *process.points.values()]
        for span in process.spans:
            moments += [span.begin, high if span.end is None else span.end]
    return [moment for moment in moments if low < moment < high]


def _before(start: Start, at: float) -> str:
    """The phase of a moment before the attempt that counts; empty from there on."""
    if not start.attempts or at >= start.attempts[-1]:
        return ""
    return FAILED if at >= start.attempts[0] and len(start.attempts) > 1 else LAUNCHER


def _released(process: Process) -> float:
    """Until when the start waits for a process; the main one is there to the end."""
    return inf if process.role == "main" else process.points.get(READY, inf)


def _named(process: Process) -> Iterator[tuple[float, float, tuple[float, ...], str]]:
    """The phases that people read, innermost first; moments in none of them belong to the next one around."""
    for place, span in enumerate(process.spans):
        if (name := group(span)) != OTHER:
            yield span.begin, inf if span.end is None else span.end, (-span.depth, -span.begin, place), name


class _Sweep(Generic[Value]):
    """Intervals (begin, end, rank, value) and which of those around a moment has the lowest rank; no two have the same.

    Moments are asked for in their order, so that all of them together take little longer than sorting the intervals.
    """

    def __init__(self, intervals: Iterable[tuple[float, float, tuple[float, ...], Value]]) -> None:
        self._later = sorted(intervals, key=lambda interval: interval[0], reverse=True)
        self._open: list[tuple[tuple[float, ...], float, Value]] = []

    def at(self, moment: float) -> Value | None:
        """The value at ``moment``; None where there is no interval."""
        while self._later and self._later[-1][0] <= moment:
            _, end, rank, value = self._later.pop()
            heapq.heappush(self._open, (rank, end, value))
        while self._open and self._open[0][1] <= moment:
            heapq.heappop(self._open)
        return self._open[0][2] if self._open else None


def group(span: Span) -> str:
    """The phase that ``span`` counts for."""
    return GROUPS.get(span.name, span.name)


def sentence(start: Start) -> str:
    """``serving after 20.5 s: imports 13.1, weights 0.2, ..., other 1.1``; empty for a start that never got ready."""
    until = length(start)
    if until is None:
        return ""
    token = start.point(WARM_UP_TOKEN)
    first = f" (first token after {token:.1f} s)" if token is not None and token <= until else ""
    found = sorted(phases(start).items(), key=lambda entry: entry[0] == OTHER)
    shown = [f"{name} {seconds:.1f}" for name, seconds in found if seconds >= 0.05 or name == "weights"]
    return f"serving after {until:.1f} s{first}: {', '.join(shown)}"
