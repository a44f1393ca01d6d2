"""Traces as processes and phases, whatever the file holds."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from tests.unit.starts.made import DETOKENIZER, LAUNCHER, MAIN, ORIGIN, SCHEDULER, Trace, usual
from weightcache.starts import draw, phases, reading, words
from weightcache.starts.reading import Span

LINES = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(usual().lines),
        st.builds(
            lambda at, pid, kind, name: (
                b'{"at":%f,"pid":%d,"kind":"%s","name":"%s"}\n' % (at, pid, kind.encode(), name.encode())
            ),
            st.floats(-1, 1e13),
            st.integers(-1, 20),
            st.sampled_from(["process", "begin", "end", "point", "other"]),
            st.sampled_from(["main", "scheduler", "weights", "ready", "serving", "attempt", "ended", "rank", "disk"]),
        ),
    ),
    max_size=40,
)


EARLY = [
    b'{"at":0,"pid":12,"kind":"point","name":"serving"}\n',
    b'{"at":1017.5,"pid":12,"kind":"process","name":"scheduler","how":"cold","facts":{"began":1009.5}}\n',
]
"""Ready before it began."""


@given(LINES, st.booleans())
@example(EARLY, True)
def test_nothing_in_a_file_breaks_its_reader(lines: list[bytes], whole: bool) -> None:
    data = (usual().lines[0] if whole else b"") + b"".join(lines)
    start = reading.parse(1, data)
    found = phases.phases(start)
    assert all(seconds >= 0 for seconds in found.values())
    assert abs(sum(found.values()) - (phases.length(start) or 0)) < 1e-6 or not found
    assert all(len(line) <= 400 for line in words.details(start, None))
    draw.lines(start, 80)
    words.plain(start, None, whole=True)
    words.row(start, None)


@given(st.data())
def test_a_file_that_was_cut_anywhere_is_read_up_to_there(data: st.DataObject) -> None:
    whole = usual().data
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    start = reading.parse(1, cut)
    assert start.damaged <= 1
    if cut.count(b"\n"):
        assert start.header is not None


def test_processes_and_what_they_did() -> None:
    start = usual().start()
    assert [process.title for process in start.processes] == ["main", "scheduler rank 0", "detokenizer"]
    assert [process.pid for process in start.processes] == [MAIN, SCHEDULER, DETOKENIZER]
    main, scheduler, _ = start.processes
    assert main.spans[0] == Span("imports", ORIGIN + 0.5, ORIGIN + 8.5)
    assert [(span.name, span.depth) for span in scheduler.spans] == [
        ("imports", 0), ("scheduler", 0), ("distributed", 1), ("weights", 1), ("graphs", 1), *[("decode graph", 2)] * 3,
    ]  # fmt: skip
    assert sorted(span.size for span in scheduler.spans if span.name == "decode graph") == [1, 2, 4]
    assert start.outcome == "attached"
    assert start.how == "cold"
    assert start.status == 0
    assert start.point("first token") == 77.5
    assert start.damaged == 0


def test_half_a_line_does_not_swallow_the_next() -> None:
    made = usual()
    made.lines.insert(5, made.lines[4][:20])
    start = made.start()
    assert start.damaged == 1
    assert words.plain(start, None, whole=True) == {**words.plain(usual().start(), None, whole=True), "damaged": 1}


def test_a_phase_that_never_ended_and_an_end_without_a_beginning() -> None:
    start = Trace().process(MAIN, "main", 0, 1).mark(1, MAIN, "begin", "kv").mark(2, MAIN, "end", "weights").start()
    assert start.processes[0].spans[1] == Span("kv", ORIGIN + 1, None)
    assert start.damaged == 0


def test_replicas_and_processes_without_a_scheduler() -> None:
    made = Trace().point(0, LAUNCHER, "attempt").process(MAIN, "main", 0, 1).process(20, "controller", 1, 2)
    for pid, replica in ((21, 0), (22, 1)):
        made.process(pid, "scheduler", 2, 3).mark(3, pid, "point", "rank", rank=0, replica=replica)
    titles = [process.title for process in made.start().processes]
    assert titles == ["main", "controller", "scheduler rank 0", "scheduler rank 0 of replica 1"]


def test_a_warm_process_begins_with_its_hand_over() -> None:
    made = Trace().mark(0.5, MAIN, "process", "main", how="warm", began=ORIGIN + 0.4, waited_since=ORIGIN - 500)
    (process,) = made.start().processes
    assert process.how == "warm"
    assert process.began == ORIGIN + 0.4


def test_marks_of_a_process_that_never_said_what_it_is_are_left_out() -> None:
    start = Trace().phase(99, "weights", 1, 2).start()
    assert start.processes == ()
    assert draw.lines(start, 80) == []
