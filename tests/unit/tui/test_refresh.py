"""Selection, scroll position and focus over changing data; what is drawn again; resizing; keys in any order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from textual.geometry import Region

from tests.unit.tui import build
from tests.unit.tui.shown import Shown, shown
from weightcache.monitor.snapshot import Snapshot
from weightcache.tui.app import Top
from weightcache.tui.widgets.table import Table

pytestmark = pytest.mark.asyncio

STATES = (
    build.ready,
    build.loading,
    build.degraded,
    build.agent_down,
    build.stale,
    build.drained,
    build.parked,
    build.mixed,
    build.fleet,
    build.hostile,
    build.empty,
)
KEYS = (
    *"q?/srcedl0123456789+-jky nx",
    *("up", "down", "home", "end", "pageup", "pagedown", "enter", "escape", "tab", "shift+tab", "space", "ctrl+p"),
)
NAMES = {"?": "question_mark", "/": "slash", "+": "plus", "-": "minus", " ": "space"}


async def test_selection_scroll_and_focus_survive() -> None:
    first = build.fleet()
    async with shown(first) as top:
        await top.press("3", "tab", "tab", "end")
        engines = top.app.screen.query_one("#engines", Table)
        scrolled, selected = engines.scroll_offset, engines.key
        assert scrolled.y > 0
        assert selected == (3, "43025")
        without = dataclasses.replace(first, ranks=first.ranks[1:])
        await top.next(without)
        assert (engines.scroll_offset, engines.key) == (scrolled, selected)
        assert top.app.screen.focused is engines
        await top.next(first)
        assert top.selected("ranks") == 3


async def test_selection_goes_to_the_neighbour_of_a_row_that_goes() -> None:
    first = build.fleet()
    async with shown(first) as top:
        await top.press("7")
        await top.next(dataclasses.replace(first, ranks=first.ranks[:7]))
        assert top.selected("ranks") == 6
        assert "rank 6: GPU 6" in top.text
        await top.next(build.empty())
        assert top.selected("ranks") is None
        assert "no rank is configured" in top.text
        await top.next(first)
        assert top.selected("ranks") == 0


async def test_latest_event_stays_on_top() -> None:
    first = build.ready()
    more = dataclasses.replace(first, events=(*first.events, build.event(6, "resumed", "by root", ago=1)))
    async with shown(first) as top:
        await top.next(more)
        assert top.selected("events")[2] == 6
        await top.press("tab", "tab", "tab", "down")
        chosen = top.selected("events")
        newer = dataclasses.replace(more, events=(*more.events, build.event(7, "drained", "by root", ago=0)))
        await top.next(newer)
        assert top.selected("events") == chosen


Drawn = list[tuple[str | None, tuple[Region, ...]]]


def watched(monkeypatch: pytest.MonkeyPatch, top: Shown) -> Drawn:
    """What is drawn from now on: the widget, and the parts of it (none: all of it)."""
    drawn: Drawn = []
    for part in top.app.screen.query("Table, Page"):
        original = part.refresh

        def refresh(*regions: Region, part=part, original=original, **options):  # type: ignore[no-untyped-def]
            drawn.append((part.id, regions))
            return original(*regions, **options)

        monkeypatch.setattr(part, "refresh", refresh)
    return drawn


async def test_nothing_is_drawn_again_that_did_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shown(build.fleet(), (160, 50)) as top:
        drawn = watched(monkeypatch, top)
        await top.next(build.fleet())
        assert drawn == []
        changed = build.fleet()
        busy = tuple(dataclasses.replace(one, running=99) if one.pid == 40001 else one for one in changed.engines)
        await top.next(dataclasses.replace(changed, engines=busy))
        assert [(name, [region.height for region in regions]) for name, regions in drawn] == [("engines", [1])]


async def test_a_second_draws_only_the_ages_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a second costs in all, tests/bench/top.py measures."""
    async with shown(build.fleet(), (160, 50)) as top:
        drawn = watched(monkeypatch, top)
        for second in range(1, 11):  # longer, and the agents are stale
            await top.next(dataclasses.replace(build.fleet(), at=build.NOW + second))
        assert all(regions for _, regions in drawn)
        assert sum(region.height for _, regions in drawn for region in regions) < 10 * 8


async def test_restart_of_an_agent_is_a_state() -> None:
    restarted = build.view(build.status(pid=9000, uptime_seconds=1.0), heard_at=build.NOW)
    async with shown(build.ready(), (160, 50)) as top:
        for found in (build.agent_down(), build.snapshot(build.down(ago=0)), build.snapshot(restarted)):
            await top.next(found)
        assert "ready" in top.line("GPU-01234567")
        assert "1.0 s" in top.line("GPU-01234567")


async def test_silence_counts_from_the_interval() -> None:
    quiet = build.snapshot(build.view(heard_at=build.NOW - 40))
    async with shown(quiet) as top:
        assert "no answer for 40 s" in top.text
    async with shown(quiet, seconds=60) as top:
        assert "no answer" not in top.text


@pytest.mark.parametrize("state", [build.fleet, build.hostile, build.empty])
async def test_resizing(state: Callable[[], Snapshot]) -> None:
    async with shown(state()) as top:
        for width, height in ((40, 10), (60, 12), (200, 60), (80, 24), (120, 30), (40, 10)):
            await top.pilot.resize_terminal(width, height)
            await top.pilot.pause()
            assert len(top.lines) == height
            assert top.lines[-1].startswith("q quit")
            if state().ranks:
                assert top.line(" 0  ").startswith(">")


@pytest.mark.parametrize("seed", range(3))
async def test_keys_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(Top, "exit", lambda *_, **__: None)  # q, and what the palette offers
    async with shown(build.fleet(), (90, 28), readonly=False) as top:
        for n in range(100):
            key = choose.choice(KEYS)
            top.app.simulate_key(NAMES.get(key, key))
            if n % 3 == 0:
                top.source.now = dataclasses.replace(choose.choice(STATES)(), at=build.NOW + n)
                top.app.tick()
                await top.pilot.pause()
            if n % 17 == 0:
                await top.pilot.resize_terminal(choose.randint(40, 200), choose.randint(10, 60))
        await top.pilot.pause()
        assert top.app.is_running
