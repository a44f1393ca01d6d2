"""The keys that do something now, as many as fit in one line; a click presses them."""

from __future__ import annotations

from collections.abc import Collection

from textual import events
from textual.binding import Binding

from weightcache.tui.cells import Cell, Line, width_of
from weightcache.tui.widgets.page import Page

GAP = "  "


class Keys(Page):
    """Made from the descriptions of the bindings; what does not fit is in the help."""

    hidden: Collection[str] = ()
    """Actions that would only say why they do nothing."""

    def update(self) -> None:
        """Ask the screen again which keys there are."""
        if self.is_attached:  # not while the screen is taken apart
            self.show(self._line)

    def _entries(self, width: int) -> list[tuple[Binding, Line]]:
        # The application's own first: quit and help must never be what does not fit.
        active = sorted(self.screen.active_bindings.values(), key=lambda found: found.node is not self.app)
        entries: list[tuple[Binding, Line]] = []
        used = 0
        for found in active:
            binding = found.binding
            if (
                not binding.show
                or binding.action in self.hidden
                or any(binding.action == other.action for other, _ in entries)
            ):
                continue
            line = [Cell(self.app.get_key_display(binding), "key"), Cell(f" {binding.description}{GAP}")]
            if used + width_of(line) - len(GAP) <= width:
                entries.append((binding, line))
                used += width_of(line)
        return entries

    def _line(self, width: int) -> list[Line]:
        return [[cell for _, line in self._entries(width) for cell in line]]

    def on_click(self, event: events.Click) -> None:
        """Press the key below the mouse."""
        left = 0
        for binding, line in self._entries(self.size.width):
            left += width_of(line)
            if event.x < left - len(GAP):
                self.app.simulate_key(binding.key)
                return
            if event.x < left:
                return
