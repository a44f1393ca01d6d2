"""What the operator reads: aligned, complete, and nothing that a terminal would obey."""

from __future__ import annotations

import re

from hypothesis import given, strategies as st

from tests.unit.launch.support import ATTACHED
from weightcache import errors, records
from weightcache.engine.directive import Decision
from weightcache.fingerprint import Difference
from weightcache.launch import decisions
from weightcache.launch.console import clean, elided, table
from weightcache.launch.help import HELP


def test_the_line_of_an_attached_rank():
    decision = records.from_plain(Decision, ATTACHED)
    assert decisions.line(decision) == (
        "rank 0: attached set 1a2b1a2b.. (272 tensors, 0.27 GB in 1 arena, 55 ms: receive 1, map 2, build 40, bind 12)"
    )


def test_other_outcomes_say_why():
    def line(**fields):
        return decisions.line(records.from_plain(Decision, {"rank": 3, "role": "target", **fields}))

    assert line(outcome="disk", message="no agent at X") == "rank 3: loaded from disk: no agent at X"
    assert line(outcome="refused", code="drained") == "rank 3: refused: drained"
    assert "after the decision: bind" in line(outcome="failed", message="bind")
    assert line(outcome="donated", set_id="ab", tensors=1, arenas=2).startswith(
        "rank 3: loaded from disk and donated set ab (1 tensor, 0.00 GB in 2 arenas"
    )
    assert line(outcome="explained", set_id="ab") == "rank 3: would attach set ab"
    assert line(outcome="explained", code="mismatch", message="m") == "rank 3: would not attach: m"
    assert line(outcome="disk", role="draft-0").startswith("rank 3 draft-0: ")


def test_the_help_names_every_exit_status_that_an_error_gives():
    told = HELP[HELP.index("Exit status:") : HELP.index("Examples:")]
    assert {error.exit_status for error in errors.tree()} <= set(map(int, re.findall(r"\b\d+\b", told)))
    assert max(map(len, HELP.splitlines())) <= 120


def test_a_table_is_aligned_and_harmless():
    hostile = "\x1b[2J\x9b31m\r\nroot\u202e" + "x" * 200
    text = decisions.differences(
        (Difference("dtype", "bfloat16", "float16", "wrong values"), Difference("model_path", hostile, "", "other"))
    )
    lines = text.split("\n")
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert {line.index("|") for line in lines} == {lines[0].index("|")}
    assert "\\x1b[2J\\x9b31m\\r\\nroo.." in text
    assert ".." in lines[3]
    assert "(none)" in lines[3]
    assert lines[2].split(" | ")[1:] == ["bfloat16" + " " * 36, "float16", "wrong values"]


@given(st.lists(st.tuples(st.text(), st.text(), st.text())))
def test_any_text_makes_one_printable_line_a_row(rows):
    lines = table(("a", "b", "c"), rows).split("\n")
    assert len(lines) == len(rows) + 2
    assert all(line.isprintable() for line in lines)


@given(st.text(), st.integers(4, 60))
def test_elided_text_keeps_both_ends(text, width):
    short = elided(text, width)
    assert len(short) <= width
    assert short == text or (short[0] == text[0] and short[-1] == text[-1])
    assert clean(text).isprintable()
