"""A trace as its processes and their phases. Whatever a file holds, it is read, and what makes no sense is counted."""

from __future__ import annotations

import bisect
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightcache.starts import folder
from weightcache.starts.record import Header, Mark, decode
from weightcache.starts.recorder import OUTCOMES

LARGEST = 8 << 20
"""Bytes of a trace that are read; a start of a hundred ranks with all its graphs leaves less than a tenth."""
MOST_MARKS = 20_000
"""Lines of a trace that are taken; a rank with all its graphs leaves some hundreds."""
DEEPEST = 64
"""Phases within one another; SGLang's come to five."""
_MARK = b'{"at":'
_ORDER = {"main": 0, "controller": 1, "scheduler": 2, "detokenizer": 3}

READY = "ready"
"""A scheduler, controller or detokenizer can do its work."""
SERVING = "serving"
"""The server's main process: it is warmed up, and calls itself ready."""
WARM_UP_TOKEN = "warm-up token"  # noqa: S105
FIRST_TOKEN = "first token"  # noqa: S105
"""Of a request that somebody made; WARM_UP_TOKEN is that of one that SGLang made itself."""


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of one process. ``end`` is None for one that never ended. ``depth`` counts the phases around it.

    ``size`` is that of the graph that was captured, else 0.
    """

    name: str
    begin: float
    end: float | None
    depth: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the engine. ``began``: it was started, or handed over if ``how`` is warm.

    ``replica`` tells schedulers of data parallelism apart, which have the same ranks.
    """

    pid: int
    role: str
    began: float
    how: str = "cold"
    rank: int = -1
    replica: int = 0
    attempt: int = 1
    spans: tuple[Span, ...] = ()
    points: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What people call it."""
        rank = f" rank {self.rank}" if self.rank >= 0 else ""
        return f"{self.role}{rank}" + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class Weights:
    """How one rank got its weights. ``milliseconds``: the steps that were timed."""

    at: float
    rank: int
    role: str
    outcome: str
    milliseconds: dict[str, float]
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Times are on the clock of the marks; ``header.began`` is their origin.

    ``header`` is None where the file's first line makes no sense. ``status``: how the server ended, None if that is not
    known. ``live``: its launcher still runs. ``damaged``: lines that make no sense.
    """

    number: int
    header: Header | None
    processes: tuple[Process, ...] = ()
    weights: tuple[Weights, ...] = ()
    attempts: tuple[float, ...] = ()
    status: int | None = None
    live: bool = False
    damaged: int = 0

    def point(self, name: str) -> float | None:
        """When ``name`` first happened, in seconds since the origin; what a file puts before that does not count."""
        if self.header is None:
            return None
        began = self.header.began
        moments = [process.points[name] - began for process in self.processes if name in process.points]
        return min((moment for moment in moments if moment >= 0), default=None)

    @property
    def main(self) -> Process | None:
        """The server's main process, of the last attempt."""
        return next((process for process in reversed(self.processes) if process.role == "main"), None)

    @property
    def how(self) -> str:
        """How the server's processes came: cold, warm, or both."""
        last = [process.how for process in self.processes if process.attempt == max(1, len(self.attempts))]
        return "+".join(sorted(set(last)))

    @property
    def outcome(self) -> str:
        """How the ranks got their weights in the last attempt; drafts do not count. Empty if nobody said so."""
        last = max((entry.attempt for entry in self.weights), default=0)
        targets = [entry for entry in self.weights if entry.attempt == last and entry.role in ("", "target")]
        return "+".join(sorted({entry.outcome for entry in targets}))


def newest_first(where: Path) -> Iterator[Start]:
    """All traces below ``where``, read one by one. Raises OSError for a directory that cannot be read."""
    for number in reversed(folder.numbers(where)):
        if (start := read(where, number)) is not None:
            yield start


def read(where: Path, number: int) -> Start | None:
    """One trace; None where there is none (any more)."""
    try:
        fd = os.open(folder.file(where, number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return Start(number, None, damaged=1)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Start(number, None, damaged=1)
        live = folder.in_use(fd)
        with open(fd, "rb", closefd=False) as opened:
            data = opened.read(LARGEST)
    except OSError:
        return Start(number, None, damaged=1)
    finally:
        os.close(fd)
    return parse(number, data, live)


def parse(number: int, data: bytes, live: bool = False) -> Start:
    """The content of a trace. Never raises."""
    first, _, rest = data.partition(b"\n")
    header, marks, damaged, lines = None, [], 0, 0
    try:
        decoded = decode(first, Header)
        header = decoded if isinstance(decoded, Header) else None
    except ValueError:
        damaged += 1
    for line in rest.split(b"\n"):
        if not line:
            continue
        lines += 1
        if lines > MOST_MARKS:
            damaged += 1
            continue
        # Half a line of a process that was killed has no end: the next one's mark follows it directly.
        half, found, mark = line.rpartition(_MARK)
        damaged += bool(half)
        try:
            decoded = decode(found + mark, Mark)
        except ValueError:
            damaged += not half
        else:
            marks += [decoded] if isinstance(decoded, Mark) else []
    if header is None:
        return Start(number, None, live=live, damaged=max(1, damaged))
    marks.sort(key=lambda mark: mark.at)
    attempts = tuple(mark.at for mark in marks if mark.kind == "point" and mark.name == "attempt")
    ends = [mark for mark in marks if mark.kind == "point" and mark.name == "ended" and "status" in mark.facts]
    processes, too_deep = _processes(marks, attempts)
    return Start(
        number,
        header,
        processes,
        tuple(
            Weights(mark.at, mark.rank, mark.how, mark.name, mark.facts, _attempt(attempts, mark.at))
            for mark in marks
            if mark.kind == "point" and mark.name in OUTCOMES
        ),
        attempts,
        int(ends[-1].facts["status"]) if ends else None,
        live,
        damaged + too_deep,
    )


def _attempt(attempts: tuple[float, ...], at: float) -> int:
    return max(1, bisect.bisect_right(attempts, at))


def _processes(marks: list[Mark], attempts: tuple[float, ...]) -> tuple[tuple[Process, ...], int]:
    """The processes, and how many of their phases are too deep."""
    by_pid: dict[int, list[Mark]] = {}
    for mark in marks:
        by_pid.setdefault(mark.pid, []).append(mark)
    found = [
        _process(first, own, attempts)
        for own in by_pid.values()
        if (first := next((mark for mark in own if mark.kind == "process"), None)) is not None
    ]
    processes = [process for process, _ in found]
    processes.sort(key=lambda p: (p.attempt, _ORDER.get(p.role, 9), p.replica, p.rank, p.began, p.pid))
    return tuple(processes), sum(too_deep for _, too_deep in found)


def _process(first: Mark, own: list[Mark], attempts: tuple[float, ...]) -> tuple[Process, int]:
    began = min(first.facts.get("began", first.at), first.at)
    named = [mark for mark in own if mark.kind == "point" and mark.name == "rank"]
    points: dict[str, float] = {}
    for mark in own:
        if mark.kind == "point" and mark.name != "rank":
            points.setdefault(mark.name, mark.at)
    spans, too_deep = _spans(began, first, own)
    process = Process(
        first.pid,
        first.name,
        began,
        first.how or "cold",
        named[0].rank if named else first.rank,
        int(named[0].facts.get("replica", 0)) if named else 0,
        _attempt(attempts, first.at),
        spans,
        points,
    )
    return process, too_deep


def _spans(began: float, first: Mark, own: Iterable[Mark]) -> tuple[tuple[Span, ...], int]:
    """Begins and ends, paired by name; those of threads may overlap, and then both lie at the same depth.

    The number counts those that are left out since they are deeper than DEEPEST.
    """
    spans: list[Span] = []
    open_: list[int] = []
    left_out: Counter[str] = Counter()
    too_deep = 0
    if first.at > began:
        spans.append(Span("imports", began, first.at))
    for mark in own:
        if mark.kind == "begin" and len(open_) >= DEEPEST:
            left_out[mark.name] += 1
            too_deep += 1
        elif mark.kind == "begin":
            open_.append(len(spans))
            spans.append(Span(mark.name, mark.at, None, len(open_) - 1, int(mark.facts.get("size", 0))))
        elif mark.kind == "end" and left_out[mark.name]:
            left_out[mark.name] -= 1
        elif mark.kind == "end":
            for index in reversed(open_):
                if spans[index].name == mark.name:
                    open_.remove(index)
                    spans[index] = replace(spans[index], end=mark.at)
                    break
    return tuple(spans), too_deep
