"""Which phases of a start took clearly longer than in the last one like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache.starts.phases import LAUNCHER, OTHER, length, phases

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightcache.starts.reading import Start

SECONDS = 0.5
SHARE = 0.3
"""Starts of the same kind differ by some tenths of a second, and on a busy machine by more."""


@dataclass(frozen=True, slots=True)
class Slower:
    """One phase, in seconds."""

    phase: str
    now: float
    before: float


def like(start: Start) -> tuple[object, ...] | None:
    """What starts have in common that can be compared; None for one that says too little."""
    if start.header is None or length(start) is None:
        return None
    return (start.header.arguments, start.header.levers, start.how, start.outcome, len(start.attempts))


def previous(start: Start, newest_first: Iterable[Start]) -> Start | None:
    """The last start before ``start`` that can be compared with it."""
    kind = like(start)
    if kind is None:
        return None
    return next((other for other in newest_first if other.number < start.number and like(other) == kind), None)


def pairs(oldest_first: Iterable[Start]) -> list[tuple[Start, Start | None]]:
    """Each start with the one that it is compared with."""
    last: dict[tuple[object, ...], Start] = {}
    found: list[tuple[Start, Start | None]] = []
    for start in oldest_first:
        kind = like(start)
        found.append((start, last.get(kind) if kind else None))
        if kind:
            last[kind] = start
    return found


def slower(start: Start, before: Start) -> tuple[Slower, ...]:
    """The phases that took clearly longer, the worst first."""
    now, then = phases(start), phases(before)
    found = [Slower(name, seconds, then.get(name, 0.0)) for name, seconds in now.items()]
    grown = [entry for entry in found if entry.now - entry.before > max(SECONDS, SHARE * entry.before)]
    return tuple(sorted(grown, key=lambda entry: entry.before - entry.now))


def sentence(start: Start, before: Start) -> str:
    """The slower phases in one line; empty if there are none."""
    found = slower(start, before)
    if not found:
        return ""
    parts = [f"{_name(entry.phase)} {entry.now:.1f} s (was {entry.before:.1f})" for entry in found]
    return f"slower than start {before.number}: {', '.join(parts)}"


def _name(phase: str) -> str:
    return {OTHER: "what has no name", LAUNCHER: "the launcher itself"}.get(phase, phase)
