"""Every key, and what a refresh must leave alone."""

from __future__ import annotations

import dataclasses
import re

import pytest
from textual.events import MouseScrollDown

from tests.unit.tui import build
from tests.unit.tui.shown import shown
from weightcache.fingerprint import diff
from weightcache.tui.screens.details import Details
from weightcache.tui.screens.help import Help
from weightcache.tui.screens.overview import Overview

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("keys", [["q"], ["ctrl+c"], ["slash", "ctrl+c"], ["c", "ctrl+c"], ["enter", "q"]])
async def test_leaving(keys: list[str]) -> None:
    async with shown(build.fleet()) as top:
        await top.press(*keys)
        assert top.app.return_code == 0
        assert not top.app.is_running


async def test_help_is_made_of_the_bindings() -> None:
    async with shown(build.ready(), (100, 60)) as top:
        await top.press("question_mark")
        assert isinstance(top.app.screen, Help)
        for binding in Overview.BINDINGS:
            assert (binding.tooltip or binding.description) in top.text.replace("\n", " ")  # type: ignore[union-attr]
        await top.press("question_mark", "escape")
        assert isinstance(top.app.screen, Overview)


async def test_rank_by_number() -> None:
    async with shown(build.fleet()) as top:
        await top.press("5")
        assert top.selected("ranks") == 5
        assert "rank 5: GPU 5" in top.text
        assert top.selected("sets") == (5, "50e3da0a074c")
        await top.press("0")
        assert top.selected("ranks") == 0
        await top.press("9")
        assert top.selected("ranks") == 0


async def test_arrows_and_tab() -> None:
    async with shown(build.fleet()) as top:
        await top.press("down", "j", "down", "k", "up")
        assert top.selected("ranks") == 1
        await top.press("end")
        assert top.selected("ranks") == 7
        await top.press("home", "tab", "down", "tab", "pagedown")
        assert top.selected("ranks") == 0
        assert top.selected("sets") == (0, "01e3da0a074c")
        assert top.selected("engines") == (0, "40006")
        await top.press("tab")
        assert top.app.screen.focused is top.app.screen.query_one("#events")
        await top.press("tab", "shift+tab", "shift+tab")
        assert top.app.screen.focused is top.app.screen.query_one("#engines")


async def test_enter_and_escape_for_each_table() -> None:
    async with shown(build.ready(), (100, 60)) as top:
        for expected in (
            ["Rank 0", "1200", "leased                3", "process 41700"],
            ["Set 6ee3da0a074c of rank 0", build.weight_set().digest, "quant_config_hash", "16 arenas", "deep_gemm"],
            ["Engine 41700 of rank 0", "sglang-chat.service", "88.0 GB", "6.10 GB", "running requests      12"],
            ["Event 5 of rank 0", "refused", "2025-11-30 14:25:00", "(dtype, quant_method)"],
        ):
            await top.press("enter")
            assert isinstance(top.app.screen, Details)
            for part in expected:
                assert part in top.text
            await top.press("escape", "tab")
            assert isinstance(top.app.screen, Overview)


async def test_details_outlive_what_they_are_about() -> None:
    async with shown(build.ready()) as top:
        await top.press("tab", "enter")
        await top.next(build.drained())
        assert "this is how it was last seen" in top.text
        assert build.MODEL in top.text
        await top.next(build.ready())
        assert "last seen" not in top.text


async def test_filter() -> None:
    async with shown(build.mixed()) as top:
        await top.press("slash", *"degr")
        assert top.app.screen.query_one("#ranks").keys == [3]  # type: ignore[attr-defined]
        assert "rank 3: GPU 3" in top.text
        await top.press("enter")
        assert "contains degr, 1 of 11" in top.line("RANK") or "/degr" in top.line("RANK")
        assert top.app.screen.focused is top.app.screen.query_one("#ranks")
        await top.next(build.mixed())
        assert top.app.screen.query_one("#ranks").keys == [3]  # type: ignore[attr-defined]
        await top.press("escape")
        assert len(top.app.screen.query_one("#ranks").keys) == 11  # type: ignore[attr-defined]
        await top.press("slash", *"q?9 ", "escape")
        assert len(top.app.screen.query_one("#ranks").keys) == 11  # type: ignore[attr-defined]
        await top.press("slash", *"nothing like it")
        assert "nothing here contains" in top.text


async def test_filter_of_the_table_in_focus() -> None:
    async with shown(build.fleet()) as top:
        await top.press("tab", "tab", "slash", *"DRAFT-1", "enter")
        assert len(top.app.screen.query_one("#engines").keys) == 6  # type: ignore[attr-defined]
        assert len(top.app.screen.query_one("#ranks").keys) == 8  # type: ignore[attr-defined]


async def test_sort_reverse_and_headings() -> None:
    async with shown(build.fleet()) as top:
        ranks = top.app.screen.query_one("#ranks")
        await top.press("s", "r")
        assert ranks.keys == [7, 6, 5, 4, 3, 2, 1, 0]  # type: ignore[attr-defined]
        assert top.selected("ranks") == 0
        assert "RANK▼" in top.text
        await top.press("s")
        assert "GPU▲" in top.text
        await top.pilot.click("#ranks", offset=(4, 0))
        assert "RANK▲" in top.text
        await top.pilot.click("#ranks", offset=(4, 0))
        assert "RANK▼" in top.text
        while "▲" in top.text or "▼" in top.text:
            await top.press("s")
        assert ranks.keys == list(range(8))  # type: ignore[attr-defined]


async def test_sort_by_size_and_unknown_last() -> None:
    async with shown(build.mixed(), (160, 50)) as top:
        ranks = top.app.screen.query_one("#ranks")
        while "WEIGHTS▲" not in top.text:
            await top.press("s")
        keys = ranks.keys  # type: ignore[attr-defined]
        assert keys[-2:] == [9, 10]
        assert keys[:2] == [1, 2]


async def test_mouse_selects_and_opens() -> None:
    async with shown(build.fleet()) as top:
        await top.pilot.click("#ranks", offset=(10, 4))
        assert top.selected("ranks") == 3
        await top.pilot.double_click("#sets", offset=(10, 1))
        await top.pilot.pause()
        assert "Set 30e3da0a074c of rank 3" in top.text
        await top.press("escape")
        await top.pilot.click("#keys", offset=(9, 0))
        await top.pilot.pause()
        assert isinstance(top.app.screen, Help)


async def test_the_wheel_scrolls_and_the_heading_says_so() -> None:
    async with shown(build.fleet(), (100, 30)) as top:
        events = top.app.screen.query_one("#events")
        await top.pilot._post_mouse_events([MouseScrollDown], "#events", offset=(5, 1))
        await top.pilot.pause()
        assert events.scroll_offset.y > 0
        assert f"({events.scroll_offset.y + 1}-" in top.line("EVENT")
        first = events.scroll_offset
        await top.next(build.fleet())
        assert events.scroll_offset == first


async def test_pause_keeps_the_data_and_counts_its_age() -> None:
    async with shown(build.ready()) as top:
        await top.press("space")
        await top.next(dataclasses.replace(build.mixed(), at=build.NOW + 3))
        assert "PAUSED, data 5 s old" in top.text
        assert "degraded" not in top.text
        top.app._state.clock = lambda: build.NOW + 90
        await top.next(build.mixed())
        assert "PAUSED, data 90 s old" in top.text
        await top.press("space")
        assert "PAUSED" not in top.text
        assert "degraded" in top.text


async def test_interval() -> None:
    async with shown(build.ready(), seconds=3.0) as top:
        await top.press("plus")
        assert "every 5 s" in top.text
        await top.press("minus", "minus", "minus", "minus", "minus", "minus")
        assert "every 0.25 s" in top.text
        assert top.source.paces == [5.0, 2.0, 1.0, 0.5, 0.25]
        await top.press("plus", "plus", "plus", "plus", "plus", "plus", "plus", "plus", "plus")
        assert "every 60 s" in top.text


async def test_timer_asks_for_snapshots() -> None:
    async with shown(build.ready(), seconds=0.05) as top:
        top.source.now = build.drained()
        await top.pilot.pause(0.3)
        assert top.source.asked > 2
        assert "drained" in top.text


async def test_compare_two_ranks() -> None:
    async with shown(build.fleet(), (100, 30)) as top:
        await top.press("c")
        assert "DIFFERING FIELDS" in top.text
        await top.press("down", "down", "enter")
        assert "1 of 29 fields differ, 28 are equal" in top.text
        assert "each rank has its own shard: this differs by nature" in top.text
        await top.press("escape", "c", "down", "down", "down", "enter")
        assert "! role" in top.text
        assert "target and draft models hold different weights" in top.text
        assert top.style("! role").color.name == "red"  # type: ignore[union-attr]
        assert top.style("= schema").dim
        await top.press("end")
        assert "An attached engine's fingerprint is its set's;" in top.text


async def test_compare_with_an_engine_that_was_refused() -> None:
    held = build.weight_set()
    wanted = dataclasses.replace(held.fingerprint, dtype="float16", quant_method="[red]awq")
    differences = diff(held.fingerprint, wanted)
    told = build.refusal(differences=differences)
    others = (
        build.refusal(pid=1, role="draft-0", differences=differences),  # of another set
        build.refusal(pid=2, code="loading", differences=()),  # not because of the weights
        build.refusal(pid=3, differences=(dataclasses.replace(differences[0], cached="int8"),)),  # of a gone set
    )
    seen = build.snapshot(build.view(build.status(sets=(held,), refusals=(*others, told))))
    async with shown(seen, (100, 60)) as top:
        await top.press("c")
        assert "engine 51300" in top.text
        assert not re.search(r"engine [123]\b", top.text)
        await top.press("enter")
        assert "engine 51300, refused 5 min ago" in top.text
        assert "2 of 29 fields differ, 27 are equal" in top.text
        assert re.search(rf"! dtype +{held.fingerprint.dtype} +float16", top.text)
        assert "[red]awq" in top.text
        assert differences[0].consequence[:40] in top.text
        assert "python -m sglang.launch_server" in top.text


async def test_compare_from_an_engine_and_with_nothing() -> None:
    async with shown(build.fleet(), (100, 30)) as top:
        await top.press("tab", "tab", "end", "c")
        await top.press("enter")
        assert "rank 0, draft-1 v3" in top.text
    async with shown(build.ready()) as top:
        await top.press("c")
        assert "compare: no other set" in top.text
    async with shown(build.empty()) as top:
        await top.press("c")
        assert "no set is selected" in top.text


async def test_palette() -> None:
    async with shown(build.mixed(), (100, 40), readonly=False) as top:
        await top.press("ctrl+p", *"rank 3")
        await top.pilot.pause(0.3)
        await top.press("enter")
        await top.pilot.pause(0.1)
        assert top.selected("ranks") == 3
        names = [command.title for command in top.app.get_system_commands(top.app.screen)]
        assert {"Pause", "Help", "Compare", "Evict", "Drain", "Journal", "Quit", "Go to rank 10"} <= set(names)
        await top.press("enter", "space")
        names = [command.title for command in top.app.get_system_commands(top.app.screen)]
        assert "Go on" in names
        assert "Back" in names
        assert "Compare" not in names


async def test_palette_offers_only_what_makes_sense() -> None:
    async with shown(build.ready(), site=None) as top:
        names = [command.title for command in top.app.get_system_commands(top.app.screen)]
        assert not {"Evict", "Drain", "Compare"} & set(names)


async def test_keys_line() -> None:
    async with shown(build.ready(), (160, 50)) as top:
        assert "e evict" not in top.lines[-1]
        assert top.lines[-1].startswith("q quit  ? help")
        await top.press("slash", "x")
        assert "esc end filter" in top.lines[-1]
        assert "/ filter" not in top.lines[-1]
    async with shown(build.ready(), (160, 50), readonly=False) as top:
        assert "e evict  d drain" in top.lines[-1]
