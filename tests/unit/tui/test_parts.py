"""The parts without a screen: text in cells, widths, heights, shares, the words for states."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from tests.unit.tui import build
from weightcache.tui import memory, rows, words
from weightcache.tui.attached import attached
from weightcache.tui.cells import ASCII, UNICODE, Cell, clip, fold, pad, safe, strip
from weightcache.tui.screens.heights import share
from weightcache.tui.widgets.columns import Column, lay_out


@given(st.text(max_size=60), st.integers(0, 30), st.sampled_from([ASCII, UNICODE]), st.booleans())
def test_clip_and_pad(content: str, width: int, marks: tuple[str, ...], tail: bool) -> None:
    clipped = clip(safe(content), width, marks, tail)  # type: ignore[arg-type]
    assert cell_len(clipped) <= width
    assert cell_len(pad(clipped, width)) == width


@given(st.text(max_size=200), st.integers(2, 40))
def test_fold_loses_nothing(content: str, width: int) -> None:
    content = safe(content)
    lines = fold(content, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == content.replace(" ", "")


@given(st.text(max_size=80), st.integers(1, 40))
def test_a_line_is_as_wide_as_it_should_be(content: str, width: int) -> None:
    assert strip([Cell(safe(content))], width).cell_length == width


@given(st.text())
def test_safe_characters_have_a_width(content: str) -> None:
    made = safe(content)
    assert made.isprintable()
    assert all(cell_len(char) for char in made)


def test_wide_characters_count_twice() -> None:
    assert clip("模型模型", 5, UNICODE) == "模型…"
    assert clip("模型模型", 5, UNICODE, tail=True) == "…模型"
    assert clip("模型模型", 8, UNICODE) == "模型模型"


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4), st.integers(4, 200))
def test_shares_fill_the_bar(amounts: list[int], cells: int) -> None:
    made = memory.shares(amounts, cells)
    assert sum(made) == cells
    assert all((part > 0) == (amount > 0) for part, amount in zip(made, amounts, strict=True)) or not sum(amounts)


@given(
    st.lists(st.integers(1, 80), min_size=5, max_size=5),
    st.integers(0, 100),
    st.sampled_from(["ranks", "sets", "engines", "events"]),
)
def test_heights_fit(wants: list[int], room: int, focused: str) -> None:
    names = ("memory", "ranks", "sets", "engines", "events")
    given_ = share(room, dict(zip(names, wants, strict=True)), focused)
    assert sum(given_.values()) == room or not any(given_.values())
    assert room < 2 or given_[focused] > 0


@given(st.integers(10, 200), st.lists(st.text("ab模", max_size=30), min_size=3, max_size=3))
def test_columns_fit_unless_nothing_can_be_dropped(width: int, texts: list[str]) -> None:
    columns = (Column("A"), Column("B", drop=1), Column("C", least=5))
    made = lay_out(columns, [[Cell(text) for text in texts]], width, None)
    assert 0 in made.columns
    assert sum(made.widths) + 2 * len(made.widths) <= max(width, 16)


def test_columns_go_by_importance() -> None:
    columns = (Column("A"), Column("B", drop=2), Column("C", drop=1))
    rows = [[Cell("x" * 10)] * 3]
    assert lay_out(columns, rows, 40, None).columns == (0, 1, 2)
    assert lay_out(columns, rows, 30, None).columns == (0, 2)
    assert lay_out(columns, rows, 14, None).columns == (0,)
    assert lay_out(columns, rows, 40, None).column_at(15) == 1
    assert lay_out(columns, rows, 40, None).column_at(0) is None


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (build.view(), "ready"),
        (build.view(build.status(0, "loading")), "loading 43 %"),
        (build.view(build.status(0, "loading", progress=None)), "loading"),
        (build.view(build.status(0, "drained")), "drained"),
        (build.view(build.status(kept="lost")), "ready, unsafe"),
        (build.view(heard_at=build.NOW - 14), "no answer for 14 s"),
        (build.view(heard_at=build.NOW - 11), "ready"),
        (build.down(), "down, last known 3 min ago"),
        (build.down(ago=0), "down"),
        (build.down(build.status(0, "stopped")), "stopped 3 min ago"),
        (build.view(agent="closed"), "closed"),
    ],
)
def test_states_in_words(view: build.RankView, expected: str) -> None:
    assert words.state(view, build.NOW, 1.0).text == expected


@pytest.mark.parametrize(
    ("kept", "part"), [("store", "service manager's store"), ("process", "agent alone"), ("lost", "lost by")]
)
def test_holders(kept: str, part: str) -> None:
    assert part in words.holders(build.status(kept=kept))
    assert "no process owns them" in words.holders(build.status(kept=kept, sets=(build.weight_set(leases=()),)))


def test_engines_that_a_report_does_not_name() -> None:
    entry = build.weight_set(leases=(build.lease(pid=1), build.lease(pid=1)), leases_total=64)
    status = build.status(sets=(entry, dataclasses.replace(entry, role="draft-0")))
    assert "mapped by 63 engines" in words.holders(status)
    [row, _] = rows.sets(build.snapshot(build.view(status)), build.view(status))
    assert row.cells[9].text == "63"


def test_an_engine_of_several_sets_is_one_engine() -> None:
    both = (build.weight_set(), build.weight_set(id="d", role="draft-0", version=2))
    found = attached(build.status(sets=both, orphans=(build.lease(5), build.lease(41700))))
    assert [(one.lease.pid, one.uses) for one in found] == [(41700, "target v1, draft-0 v2, gone"), (5, "gone")]


def test_engines_whose_memory_nobody_tells() -> None:
    shown = build.snapshot(build.view(), devices=(build.device(0, ()),))
    legend = "".join(cell.text for cell in memory.lines(shown, shown.ranks[0], 1.0, ASCII, 100)[1])
    assert "engines unknown, in other" in legend


def test_no_device() -> None:
    shown = build.snapshot(build.view(), devices=())
    first = "".join(cell.text for cell in memory.lines(shown, shown.ranks[0], 1.0, ASCII, 100)[0])
    assert first == "rank 0: weights 16.4 GB; device memory unknown"


def test_over_ssh_fewer_frames_are_drawn() -> None:
    code = "import weightcache.tui.app, textual.constants; print(textual.constants.MAX_FPS)"

    def frames(environment: dict[str, str]) -> str:
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout

    assert frames({"SSH_CONNECTION": "1 2 3 4"}) == "15\n"
    assert frames({"SSH_CONNECTION": "1 2 3 4", "TEXTUAL_FPS": "30"}) == "30\n"
    assert frames({}) == "60\n"


def test_the_screen_loads_nothing_of_the_other_processes() -> None:
    code = "import sys, weightcache.tui.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    for name in ("torch", "sglang", "numpy", "weightcache.server", "weightcache.loader", "weightcache.engine"):
        assert name not in loaded
