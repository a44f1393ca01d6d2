"""Where the time of one start went: every moment until the server was ready belongs to one phase.

At each moment one process is the one that the start waits for: a scheduler from its beginning until it is ready, the
last of them to get ready where there are several; before and after that the process that started it. The moment
belongs to that process's innermost phase. So the phases of a start add up to its length, whatever runs beside them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from weightcache.starts.reading import READY, SERVING, WARM_UP_TOKEN

if TYPE_CHECKING:
    from weightcache.starts.reading import Process, Span, Start

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
    edges = sorted({origin, origin + until, *_edges(start, chain, origin, origin + until)})
    found: dict[str, float] = {}
    for begin, end in pairwise(edges):
        name = _phase(start, chain, (begin + end) / 2)
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


def _phase(start: Start, chain: list[Process], at: float) -> str:
    if start.attempts and at < start.attempts[-1]:
        return FAILED if at >= start.attempts[0] and len(start.attempts) > 1 else LAUNCHER
    for process in reversed(chain):
        ready = process.points.get(READY)
        if process.began <= at and (ready is None or at < ready or process.role == "main"):
            return _within(process, at)
    return LAUNCHER


def _within(process: Process, at: float) -> str:
    """The innermost phase that people read; of those that mean nothing to them, the next one around."""
    around = [span for span in process.spans if span.begin <= at and (span.end is None or at < span.end)]
    for span in sorted(around, key=lambda span: (span.depth, span.begin), reverse=True):
        if (name := group(span)) != OTHER:
            return name
    return OTHER


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
