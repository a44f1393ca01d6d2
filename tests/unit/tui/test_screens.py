"""What the screens look like, at the two sizes that matter. WEIGHTCACHE_UPDATE_SCREENS=1 draws them anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.tui import build
from tests.unit.tui.shown import shown
from weightcache.monitor.snapshot import Snapshot
from weightcache.tui.widgets.table import Table

SIZES = {"80x24": (80, 24), "160x50": (160, 50)}
STATES: dict[str, Callable[[], Snapshot]] = {
    "ready": build.ready,
    "loading": build.loading,
    "degraded": build.degraded,
    "down": build.agent_down,
    "stale": build.stale,
    "drained": build.drained,
    "parked": build.parked,
    "states": build.mixed,
    "fleet": build.fleet,
    "hostile": build.hostile,
    "empty": build.empty,
    "slots": build.two_slots,
    "slots-troubled": build.troubled_slots,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STATES)
async def test_states(name: str, size: str) -> None:
    async with shown(STATES[name](), SIZES[size]) as top:
        top.golden(f"{name}-{size}")


PAGES = {
    "set": ["tab", "enter"],
    "engine": ["tab", "tab", "enter"],
    "rank": ["enter"],
    "event": ["tab", "tab", "tab", "enter"],
    "help": ["question_mark"],
    "choose": ["c"],
    "compare": ["c", "down", "down", "enter"],
    "confirm": ["e"],
    "filter": ["slash", *"gpu-3"],
}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "size"), [*((name, "80x24") for name in PAGES), *((name, "160x50") for name in ("set", "compare", "help"))]
)
async def test_pages(name: str, size: str) -> None:
    async with shown(build.fleet(), SIZES[size], readonly=False) as top:
        await top.press(*PAGES[name])
        top.golden(f"page-{name}-{size}")


@pytest.mark.asyncio
async def test_a_slot() -> None:
    async with shown(build.troubled_slots()) as top:
        await top.press("tab", "enter")
        top.golden("page-slot-80x24")


@pytest.mark.asyncio
async def test_slots_come_and_go() -> None:
    async with shown(build.ready()) as top:
        before = top.text
        await top.next(build.two_slots())
        assert "chat-a  active" in top.text
        assert "chat-a (active)" in top.line("41700")
        await top.press("tab")
        assert top.app.focused is top.app.screen.query_one("#slots")
        await top.next(build.ready())
        assert "chat-a" not in top.text
        await top.press("tab")
        assert isinstance(top.app.focused, Table)
    assert "SLOT" not in before


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_ascii(size: str) -> None:
    async with shown(build.ready(), SIZES[size], ascii=True, readonly=False) as top:
        assert top.text.isascii()
        top.golden(f"ascii-{size}")
        await top.press("d")
        assert top.text.isascii()
        top.golden(f"ascii-confirm-{size}")


@pytest.mark.asyncio
async def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown(build.mixed()) as top:
        filters = [found for found in top.app._filters if type(found).__name__ == "NoColor"]
        assert filters, "textual honours NO_COLOR by this filter"
        background = top.app.screen.styles.background
        for line in top.segments():
            for segment in filters[0].apply(line, background):
                style = segment.style
                assert style is None or style.color is None or style.color.is_default
        top.golden("states-80x24")


@pytest.mark.asyncio
async def test_what_stale_and_bad_look_like() -> None:
    async with shown(build.mixed(), (160, 50)) as top:
        colours = {"ready": "green", "loading 43 %": "yellow", "drained": "yellow", "degraded": "red", "failed": "red"}
        for word, colour in colours.items():
            found = top.style(word).color
            assert found is not None
            assert found.name == colour
        row = next(line for line in top.segments() if any("no answer for 14 s" in part.text for part in line))
        assert all(part.style and part.style.dim for part in row if "llama" in part.text or "16.4 GB" in part.text)
        fresh = next(line for line in top.segments() if any("GPU-11234567" in part.text for part in line))
        assert not any(part.style and part.style.dim for part in fresh if "llama" in part.text)


@pytest.mark.parametrize("name", ["fleet", "hostile", "states"])
@pytest.mark.asyncio
async def test_no_line_is_wider_or_narrower_than_the_screen(name: str) -> None:
    from rich.cells import cell_len

    async with shown(STATES[name](), (97, 31)) as top:
        for keys in ([], ["tab", "enter"], ["escape", "question_mark"], ["escape", "c"]):
            await top.press(*keys)
            for line in top.segments():
                assert sum(cell_len(segment.text) for segment in line) == 97
                assert all(segment.text.isprintable() for segment in line)
