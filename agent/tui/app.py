"""The application: a timer that asks for snapshots, and the keys that work on every screen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.timer import Timer

from weightcache.tui.cells import ASCII, UNICODE
from weightcache.tui.screens.help import Help
from weightcache.tui.screens.overview import Overview
from weightcache.tui.screens.view import View
from weightcache.tui.selection import comparable
from weightcache.tui.state import State
from weightcache.tui.widgets.table import Table
from weightcache.tui.words import state as state_of

if TYPE_CHECKING:
    from weightcache.monitor.site import Site
    from weightcache.monitor.snapshot import Source

STYLE = """

#keys { dock: bottom; height: 1; }
#filter { dock: bottom; height: 1; margin-bottom: 1; border: none; padding: 0; }

.roomy #slots, .roomy #memory, .roomy #sets, .roomy #engines, .roomy #events { margin-top: 1; }

Confirm, Choose { align: center middle; }
#window { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round ansi_default; padding: 0 1; }
#window-keys { margin-top: 1; height: 1; }
#choices { max-height: 12; }
.ascii #window { border: ascii ansi_default; }
.ascii Toast { border-left: ascii ansi_default; }
.ascii CommandPalette #--input { border: ascii ansi_default; }
.ascii CommandPalette CommandList { border: none; }
CommandPalette SearchIcon { display: none; }
"""
"""The terminal's own colours. What matters is said in words, and no line is spent on frames."""


class Top(App[None]):
    """The screen of wcache-top, fed by ``source`` every ``interval`` seconds.

    Without a ``site`` it is a replay. ``readonly`` switches off what changes agents; ``ascii`` draws bars and frames
    with ASCII characters; ``clock`` gives seconds since the epoch.
    """

    CSS = STYLE
    TITLE = "wcache-top"
    ALLOW_SELECT = False
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_DISPLAY = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("question_mark", "help", "help", key_display="?", tooltip="this page"),
        Binding("space", "pause", "pause", tooltip="stop and go on; the age of the data keeps counting"),
        Binding("plus,equals_sign", "pace(1)", "longer interval", show=False, key_display="+"),
        Binding("minus", "pace(-1)", "shorter interval", show=False, key_display="-"),
        Binding("ctrl+p", "command_palette", "palette", show=False, tooltip="a list of what can be done now"),
        Binding("tab,shift+tab", "", "next or previous table", show=False, key_display="tab"),
    ]

    def __init__(
        self,
        source: Source,
        *,
        site: Site | None,
        interval: float = 1.0,
        ascii: bool = False,
        readonly: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # The terminal's own palette, unless somebody chose a theme of textual's.
        themed = "TEXTUAL_THEME" in os.environ
        super().__init__(ansi_color=None if themed else True)
        if not themed:
            self.theme = "ansi-dark"
        self.animation_level = "none"
        self._source = source
        self._timer: Timer | None = None
        marks = ASCII if ascii else UNICODE
        self._state = State(source.snapshot(), interval, marks, clock, site, readonly)
        self.set_class(ascii, "ascii")

    def get_default_screen(self) -> Screen[Any]:
        """The overview."""
        return Overview(self._state)

    def on_mount(self) -> None:
        """Begin to ask."""
        self._timer = self.set_interval(self._state.seconds, self.tick)

    def tick(self) -> None:
        """Show what is known now on every screen that is open."""
        if not self._state.paused:
            self._state.snapshot = self._source.snapshot()
        self._show()

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, View) and screen.complete:
                screen.show()

    def get_key_display(self, binding: Binding) -> str:
        """Keys by their names, not by signs that a terminal may lack."""
        return binding.key_display or binding.key

    # -- keys ----------------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, Help):
            groups = [("Everywhere", Top.BINDINGS), ("Overview", Overview.BINDINGS), ("In a table", Table.BINDINGS)]
            self.push_screen(Help(self._state, groups))

    def action_pause(self) -> None:
        """Stop or go on."""
        self._state.paused = not self._state.paused
        self.tick()

    def action_pace(self, by: int) -> None:
        """Take the next longer or shorter interval."""
        seconds = self._state.step(by)
        if seconds != self._state.seconds and self._timer is not None:
            self._state.seconds = seconds
            self._source.pace(seconds)
            self._timer.stop()
            self._timer = self.set_interval(seconds, self.tick)
            self._show()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the palette offers now. Nothing of it is text of unknown origin: the palette reads markup."""
        state = self._state
        yield SystemCommand("Go on" if state.paused else "Pause", "the space bar does too", self.action_pause)
        yield SystemCommand("Help", "all keys", self.action_help)
        if isinstance(screen, Overview):
            press = self.simulate_key
            for view in state.snapshot.ranks:
                rank = view.status.rank
                words = state_of(view, state.snapshot.at, state.seconds).text
                about = words if words.isascii() and "[" not in words else "of a state that this version does not know"
                yield SystemCommand(f"Go to rank {rank}", about, partial(screen.action_rank, rank))
            if len(comparable(state)) > 1 or any(view.status.refusals for view in state.snapshot.ranks):
                yield SystemCommand("Compare", "the selected set's fingerprint with another's", partial(press, "c"))
            if not state.why_no_actions():
                yield SystemCommand("Evict", "drop the selected set, after a question", partial(press, "e"))
                yield SystemCommand("Drain", "empty the selected rank, after a question", partial(press, "d"))
            yield SystemCommand("Journal", "of the selected rank", partial(press, "l"))
        elif isinstance(screen, View):
            yield SystemCommand("Back", "to the overview", self.pop_screen)
        yield SystemCommand("Quit", "and leave everything as it is", self.exit)
