"""An application under test, what its screen shows, and whether that is what it showed before."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.pilot import Pilot

from tests.unit.tui import build
from weightcache.config import Config
from weightcache.monitor.site import Site
from weightcache.monitor.snapshot import Snapshot
from weightcache.tui.app import Top

SCREENS = Path(__file__).parent / "screens"
SITE = Site(Config(), Path("/nonexistent"))


class Shown:
    """The application, its pilot and its source; ``now`` is what the clock says."""

    def __init__(self, app: Top, source: build.Played, pilot: Pilot[None]) -> None:
        self.app = app
        self.source = source
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def next(self, snapshot: Snapshot) -> None:
        """The source has something new, and the timer rings."""
        self.source.now = snapshot
        self.app.tick()
        await self.pilot.pause()

    def segments(self) -> list[list[Segment]]:
        return [list(strip) for strip in self.app.screen._compositor.render_strips()]

    @property
    def lines(self) -> list[str]:
        return ["".join(segment.text for segment in line).rstrip() for line in self.segments()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def line(self, part: str) -> str:
        """The first line that contains ``part``."""
        return next(line for line in self.lines if part in line)

    def style(self, word: str) -> Style:
        """How the first piece that contains ``word`` is drawn."""
        found = (one for line in self.segments() for one in line if word in one.text)
        return next(found).style or Style.null()

    def selected(self, table: str) -> Any:
        return self.app.screen.query_one(f"#{table}").key  # type: ignore[attr-defined]

    def golden(self, name: str) -> None:
        """Compare the screen with the one in the file, or keep it as the new one."""
        file = SCREENS / f"{name}.txt"
        if os.environ.get("WEIGHTCACHE_UPDATE_SCREENS") == "1":
            assert "CI" not in os.environ, "screens are made by whoever looks at them, not in CI"
            file.write_text(self.text + "\n")
        assert self.text + "\n" == file.read_text(), f"tests/unit/tui/screens/{name}.txt shows another screen"


@asynccontextmanager
async def shown(
    snapshot: Snapshot,
    size: tuple[int, int] = (80, 24),
    *,
    site: Site | None = SITE,
    seconds: float = 1.0,
    **options: Any,
) -> AsyncIterator[Shown]:
    """Run the application; only ``next`` and keys change what it shows."""
    source = build.Played(snapshot)
    app = Top(source, site=site, interval=seconds, clock=lambda: build.NOW + 5, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield Shown(app, source, pilot)
