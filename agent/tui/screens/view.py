"""What every screen has: the header above, the keys below, and a way to be told that there is something new."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from weightcache.tui.facts import Fact, listing
from weightcache.tui.state import State
from weightcache.tui.widgets.keys import Keys
from weightcache.tui.widgets.page import Page, Reader


class View(Screen[None]):
    """A full screen; ``body`` gives what is between header and keys."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state
        # Asked for by name they would be missing while the screen is taken apart.
        self.header = Page(state.header, id="header")
        self.keys = Keys(id="keys")
        self.complete = False
        """Whether all widgets are there."""

    def compose(self) -> ComposeResult:
        """Header, body, keys."""
        yield self.header
        yield from self.body()
        yield self.keys

    def body(self) -> ComposeResult:
        """The widgets of this screen."""
        raise NotImplementedError

    def show(self) -> None:
        """Show what is new in the state."""
        self.header.show(self.state.header)
        self.show_keys()

    def show_keys(self) -> None:
        """Show the keys that do something now."""
        self.keys.hidden = self.hidden()
        self.keys.update()

    def hidden(self) -> Collection[str]:
        """Actions whose keys are not worth showing."""
        return ()

    def on_mount(self) -> None:
        """Show what there is."""
        self.complete = True
        self.show()

    def on_screen_resume(self) -> None:
        """Show what is new since another screen covered this one."""
        if self.complete:
            self.show()


class ReadingView(View):
    """A screen of text that Esc leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back", key_display="esc")]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.reader = Reader(id="text")

    def body(self) -> ComposeResult:
        """The text, between header and keys."""
        yield self.reader

    def text(self, facts: list[Fact]) -> None:
        """Show facts as the text."""
        self.reader.show(lambda width: listing(facts, width))
