"""Traces with far more in them than a start leaves: the same phases as one by one, and a limit to what is taken."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given, strategies as st

from tests.unit.starts.made import LAUNCHER, MAIN, ORIGIN, SCHEDULER, Trace, usual
from weightcache.starts import phases, reading
from weightcache.starts.phases import FAILED, OTHER
from weightcache.starts.reading import READY, Process, Start

NAMES = ["weights", "kv", "graphs", "decode graph", "scheduler", "spawn", "main", "tokenizer"]
MARKS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from([MAIN, SCHEDULER, 21, 22]),
        st.sampled_from(["begin", "begin", "end", "end", "ready", "attempt"]),
        st.sampled_from(NAMES),
    ),
    max_size=60,
)
ROLES = ["main", "main", "scheduler", "controller", "detokenizer"]
PROCESSES = st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=4)


def one_by_one(start: Start) -> dict[str, float]:
    """What ``phases`` says, by looking at every phase for each moment: slow, and plainly what the documents say."""
    until = phases.length(start)
    if until is None or start.header is None:
        return {}
    origin, chain = start.header.began, phases._chain(start)
    edges = sorted({origin, origin + until, *phases._edges(start, chain, origin, origin + until)})
    found: dict[str, float] = {}
    for begin, end in pairwise(edges):
        name = _phase(start, chain, (begin + end) / 2)
        found[name] = found.get(name, 0.0) + end - begin
    return found


def _phase(start: Start, chain: list[Process], at: float) -> str:
    if start.attempts and at < start.attempts[-1]:
        return FAILED if at >= start.attempts[0] and len(start.attempts) > 1 else phases.LAUNCHER
    for process in reversed(chain):
        ready = process.points.get(READY)
        if process.began <= at and (ready is None or at < ready or process.role == "main"):
            return _within(process, at)
    return phases.LAUNCHER


def _within(process: Process, at: float) -> str:
    around = [span for span in process.spans if span.begin <= at and (span.end is None or at < span.end)]
    for span in sorted(around, key=lambda span: (span.depth, span.begin), reverse=True):
        if (name := phases.group(span)) != OTHER:
            return name
    return OTHER


@given(PROCESSES, MARKS, st.integers(0, 30))
def test_phases_are_those_of_every_moment(
    processes: list[tuple[str, int, int]], marks: list[tuple[int, int, str, str]], serving: int
) -> None:
    made = Trace()
    for pid, (role, began, seconds) in zip([MAIN, SCHEDULER, 21, 22], processes, strict=False):
        made.process(pid, role, began, began + seconds)
    for at, pid, kind, name in marks:
        if kind in ("begin", "end"):
            made.mark(at, pid, "begin" if kind == "begin" else "end", name)
        else:
            made.point(at, pid if kind == "ready" else LAUNCHER, kind)
    start = made.point(serving, MAIN, "serving").start()
    assert phases.phases(start) == one_by_one(start)


def many(count: int) -> Trace:
    made = Trace().point(0, LAUNCHER, "attempt").process(MAIN, "main", 0, 1).process(SCHEDULER, "scheduler", 1, 2)
    for i in range(count):
        made.phase(SCHEDULER, "weights" if i % 2 else "kv", 2 + i, 2.5 + i)
    return made.point(3 + count, SCHEDULER, "ready").point(4 + count, MAIN, "serving")


def test_many_phases_take_no_square_of_their_number() -> None:
    start = many(9_000).start()
    assert start.damaged == 0
    assert len(start.processes[1].spans) == 9_001
    began = time.process_time()
    found = phases.phases(start)
    assert time.process_time() - began < 3  # one by one: about a minute
    assert (found["weights"], found["kv"]) == (2250.0, 2250.0)


def test_many_processes_and_attempts_neither() -> None:
    made = Trace()
    for i in range(9_000):
        made.point(i / 10, LAUNCHER, "attempt").process(100 + i, "main", 900, 1000 + i)
    began = time.process_time()
    start = made.point(20_000, 100, "serving").start()
    assert phases.phases(start)
    assert time.process_time() - began < 5


def test_lines_beyond_the_limit_are_damage() -> None:
    made = many(15_000)
    start = made.start()
    assert start.damaged == len(made.lines) - 1 - reading.MOST_MARKS
    assert sum(len(process.spans) for process in start.processes) <= reading.MOST_MARKS


def test_phases_that_are_too_deep_are_damage_and_change_no_other() -> None:
    made = Trace().process(MAIN, "main", 0, 1)
    for _ in range(reading.DEEPEST + 10):
        made.mark(1, MAIN, "begin", "weights")
    for i in range(10):
        made.mark(2 + i / 10, MAIN, "end", "weights")
    start = made.mark(5, MAIN, "end", "weights").start()
    (main,) = start.processes
    assert start.damaged == 10
    assert max(span.depth for span in main.spans) == reading.DEEPEST - 1
    assert [span.end for span in main.spans if span.end is not None] == [ORIGIN + 1, ORIGIN + 5]
    assert usual().start().damaged == 0
