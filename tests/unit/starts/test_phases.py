"""Every moment of a start belongs to one phase, and phases are compared with those of the last start like it."""

from __future__ import annotations

import pytest

from tests.unit.starts.made import LAUNCHER, MAIN, ORIGIN, SCHEDULER, Trace, header, usual
from weightcache.starts import comparison, phases, reading
from weightcache.starts.record import encode


def test_phases_add_up_to_the_length() -> None:
    start = usual().start()
    assert phases.length(start) == pytest.approx(22.5)
    assert phases.phases(start) == {
        "launcher": pytest.approx(0.5),
        "imports": pytest.approx(16.0),
        "arguments": pytest.approx(1.0),
        "distributed": pytest.approx(0.5),
        "weights": pytest.approx(0.25),
        "other": pytest.approx(0.25 + 0.5 + 0.5),
        "graphs": pytest.approx(1.0),
        "warm-up": pytest.approx(2.0),
    }


def test_the_sentence() -> None:
    assert phases.sentence(usual().start()) == (
        "serving after 22.5 s (first token after 22.0 s): launcher 0.5, imports 16.0, arguments 1.0, distributed 0.5, "
        "weights 0.2, graphs 1.0, warm-up 2.0, other 1.2"
    )
    assert phases.sentence(Trace().start()) == ""


def test_without_a_warm_up_there_is_no_token_in_it() -> None:
    made = Trace().process(MAIN, "main", 0, 1).point(3, MAIN, "serving").point(9, MAIN, "first token")
    assert phases.sentence(made.start()) == "serving after 3.0 s: imports 1.0, other 2.0"


def test_the_rank_that_is_ready_last_is_the_one_that_is_waited_for() -> None:
    made = Trace().point(0, LAUNCHER, "attempt").process(MAIN, "main", 0, 1)
    for pid, rank, seconds in ((21, 0, 1.0), (22, 1, 5.0), (23, 2, 2.0)):
        made.process(pid, "scheduler", 1, 2).mark(2, pid, "point", "rank", rank=rank)
        made.phase(pid, "weights", 2, 2 + seconds).point(2 + seconds, pid, "ready")
    start = made.point(8, MAIN, "serving").start()
    waited = phases.waited_for(start)
    assert waited is not None
    assert waited.rank == 1
    assert phases.phases(start) == {"imports": 2.0, "weights": 5.0, "other": 1.0}


def test_a_controller_stands_between_main_and_its_schedulers() -> None:
    made = Trace().point(0, LAUNCHER, "attempt").process(MAIN, "main", 0, 1).process(20, "controller", 1, 4)
    made.process(21, "scheduler", 5, 8).point(9, 21, "ready").point(10, 20, "ready").point(11, MAIN, "serving")
    assert phases.phases(made.start()) == {"imports": 1.0 + 3.0 + 3.0, "other": 1.0 + 1.0 + 1.0 + 1.0}


def test_a_start_that_was_repeated_from_disk_is_one_start() -> None:
    made = Trace().point(0, LAUNCHER, "attempt").process(MAIN, "main", 0, 8)
    made.process(SCHEDULER, "scheduler", 8, 12).mark(13, LAUNCHER, "point", "failed", rank=0, how="target")
    made.point(14, LAUNCHER, "attempt").process(31, "main", 14, 22).process(32, "scheduler", 22, 30)
    made.mark(30, LAUNCHER, "point", "disk", rank=0, how="target").phase(32, "weights", 30, 33).point(33, 32, "ready")
    start = made.point(34, 31, "serving").start()
    assert [process.attempt for process in start.processes] == [1, 1, 2, 2]
    assert start.outcome == "disk"
    assert phases.phases(start) == {"failed attempt": 14.0, "imports": 16.0, "weights": 3.0, "other": 1.0}


def test_a_start_that_failed_has_no_phases() -> None:
    made = Trace().process(MAIN, "main", 0, 8).point(9, LAUNCHER, "ended", status=1)
    assert phases.phases(made.start()) == {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (usual(), True),
        (usual(outcome="disk"), False),
        (usual(how="warm"), False),
        (Trace(), False),
        (Trace([encode(header(levers=())), *usual().lines[1:]]), False),
        (Trace([encode(header(arguments=("--model-path", "b"))), *usual().lines[1:]]), False),
        (Trace([encode(header(model="/models/a", epoch=1.0)), *usual().lines[1:]]), True),
    ],
)
def test_only_starts_of_one_kind_are_compared(other: Trace, found: bool) -> None:
    start = usual().start(5)
    before = comparison.previous(start, [start, other.start(4)])
    assert (before is not None) == found


def test_the_last_one_is_compared_and_none_after() -> None:
    start = usual().start(5)
    others = [usual().start(number) for number in (7, 5, 3, 2)]
    before = comparison.previous(start, others)
    assert before is not None
    assert before.number == 3


def test_all_starts_are_paired_as_one_by_one() -> None:
    starts = [
        usual().start(1), usual(outcome="disk").start(2), Trace().start(3), usual().start(4),
        usual(how="warm").start(5), usual(outcome="disk").start(6), reading.parse(7, b"garbage"), usual().start(8),
    ]  # fmt: skip
    assert comparison.pairs(starts) == [(start, comparison.previous(start, starts[::-1])) for start in starts]
    assert [before and before.number for _, before in comparison.pairs(starts)] == [
        None,
        None,
        None,
        1,
        None,
        2,
        None,
        4,
    ]


def test_a_phase_that_became_slower_is_named() -> None:
    before, start = usual(imports=3.0).start(1), usual().start(2)
    assert comparison.slower(start, before) == (comparison.Slower("imports", pytest.approx(16.0), pytest.approx(6.0)),)
    assert comparison.sentence(start, before) == "slower than start 1: imports 16.0 s (was 6.0)"
    assert comparison.sentence(before, start) == ""


def test_noise_is_not_slower() -> None:
    assert comparison.slower(usual(imports=8.4).start(2), usual(imports=8.0).start(1)) == ()
    assert comparison.slower(usual(imports=0.2).start(2), usual(imports=0.0).start(1)) == ()


def test_one_that_never_served_is_compared_with_nothing() -> None:
    assert comparison.previous(Trace().start(2), [usual().start(1)]) is None
    assert comparison.like(reading.parse(1, b"garbage")) is None


def test_the_origin_is_the_headers() -> None:
    start = usual().start()
    assert start.header is not None
    assert start.header.began == ORIGIN
