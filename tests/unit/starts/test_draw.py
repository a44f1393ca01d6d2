"""Bars in a terminal."""

from __future__ import annotations

import re

import pytest

from tests.unit.starts.made import MAIN, SCHEDULER, Trace, usual
from weightcache.starts import draw
from weightcache.starts.draw import Canvas


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("plain", [True, False])
def test_every_line_fits(width: int, plain: bool) -> None:
    lines = draw.lines(usual().start(), width, plain)
    assert max(map(len, lines)) <= width
    assert len(lines) == 20
    assert all(line.isascii() for line in lines) == plain
    assert not any("\x1b" in line for line in lines)


def test_a_narrow_terminal_gets_what_there_is() -> None:
    assert len(draw.lines(usual().start(), 20)) == 20


def test_bars_lie_on_one_axis() -> None:
    lines = {line[:24].strip(): line[25:] for line in draw.lines(usual().start(), 80, plain=True)[:9]}
    canvas = Canvas(80, 22.5)
    assert lines["seconds"].startswith("0")
    for text in re.finditer(r"\d+", lines["seconds"]):
        assert text.start() == round(canvas.column(int(text[0])))
    first, last = (lines["arguments"].rstrip(" .0123456789").rfind("#"), lines["tokenizer"].find("#"))
    assert abs(first - canvas.column(9.5)) <= 1
    assert abs(last - canvas.column(9.5)) <= 1


def test_graphs_of_all_sizes_share_a_row() -> None:
    rows = [line for line in draw.lines(usual().start(), 80) if "decode graph" in line]
    assert len(rows) == 1
    assert rows[0].startswith("    decode graph x3")
    assert rows[0].endswith("0.30")


def test_a_phase_that_takes_no_time_is_still_seen() -> None:
    assert Canvas(80, 100.0, plain=True).bar([(50.0, 50.0001)]).strip() == "."
    assert Canvas(80, 100.0).bar([(50.0, 50.0001)]).strip() == "▏"
    assert Canvas(80, 100.0, plain=True).bar([(100.0, 100.0)]).strip() == "."


def test_what_comes_after_serving_is_no_bar() -> None:
    made = usual().phase(SCHEDULER, "prefill graph", 50, 52)
    (row,) = [line for line in draw.lines(made.start(), 80, plain=True) if "prefill graph" in line]
    assert "(from 50.0 s)" in row
    assert "#" not in row


def test_a_start_that_never_served_is_drawn_as_far_as_it_came() -> None:
    made = Trace().process(MAIN, "main", 0, 8).mark(9, MAIN, "begin", "kv").point(12, MAIN, "listening")
    lines = draw.lines(made.start(), 80, plain=True)
    assert lines[3].startswith("  kv ")
    assert lines[3].endswith("3.00...")


def test_names_of_other_processes_cannot_steer_a_terminal() -> None:
    made = Trace().process(MAIN, "ma\x1b[31min", 0, 8).phase(MAIN, "k\x07v", 8, 9)
    assert not any("\x1b" in line or "\x07" in line for line in draw.lines(made.start(), 80))
