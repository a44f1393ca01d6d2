"""Lines of text that fit themselves to the width: headers, details, help, dialogs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from weightcache.tui.cells import Cell, Line, strip

Build = Callable[[int], Sequence[Line]]
"""The lines for a width in cells."""


class Page(ScrollView, can_focus=False):
    """Shows the lines of a Build; draws only those again that changed."""

    DEFAULT_CSS = "Page { scrollbar-size: 0 0; overflow-x: hidden; overflow-y: auto; height: auto; }"

    def __init__(self, build: Build | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._build: Build = build or (lambda width: ())
        self._lines: list[Line] = []

    def show(self, build: Build) -> None:
        """Show other lines; the scroll position stays."""
        self._build = build
        self._rebuild()

    def wanted(self, width: int) -> int:
        """The height at which nothing needs to scroll."""
        return len(self._build(width))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as the text needs at ``width``."""
        return self.wanted(width)

    def on_resize(self) -> None:
        """Fold the lines anew."""
        self._rebuild()

    def _rebuild(self) -> None:
        before, width = self._lines, self.size.width or self.app.size.width  # a good guess before the first layout
        self._lines = list(self._build(width))
        if len(before) != len(self._lines):
            self.virtual_size = Size(width, len(self._lines))
            self.refresh(layout=True)
            return
        for i, pair in enumerate(zip(before, self._lines, strict=True)):
            y = i - self.scroll_offset.y
            if pair[0] != pair[1] and 0 <= y < self.size.height:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        """One of the lines."""
        index = y + self.scroll_offset.y
        return strip(self._lines[index] if index < len(self._lines) else [Cell("")], self.size.width)


class Reader(Page, can_focus=True):
    """A page that has the focus and scrolls by the usual keys."""

    DEFAULT_CSS = "Reader { height: 1fr; }"
