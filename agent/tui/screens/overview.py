"""The main screen: ranks, engines with a standby, the selected rank's memory, its sets, its engines, what happened."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from weightcache.tui import comparison, memory, rows, selection, slots
from weightcache.tui.comparison import Side
from weightcache.tui.screens import requests
from weightcache.tui.screens.compare import Compare
from weightcache.tui.screens.details import Details
from weightcache.tui.screens.dialogs import Choose
from weightcache.tui.screens.heights import share
from weightcache.tui.screens.view import View
from weightcache.tui.widgets.page import Page
from weightcache.tui.widgets.table import Row, Table

if TYPE_CHECKING:
    from weightcache.monitor.view import RankView
    from weightcache.tui.state import State

ROOMY = 36
"""Lines from which on blank ones between the parts are affordable."""

IMPORTANCE = ("memory", "ranks", "slots", "sets", "engines", "events")
"""Of the parts, where there are too few lines: the sentences that say what is wrong come first."""


class Overview(View):
    """Everything hangs on the rank that is selected in the first table."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash", "filter", "filter", key_display="/", tooltip="show only rows that contain a text; Esc ends it"
        ),
        Binding(
            "s", "sort", "sort", tooltip="sort the table in focus by its next column; a click on a heading does too"
        ),
        Binding("r", "reverse", "reverse", show=False, tooltip="reverse the order of the table in focus"),
        Binding(
            "c",
            "compare",
            "compare",
            tooltip="compare the selected set with another one, or a refused engine",
        ),
        Binding("e", "evict", "evict", tooltip="drop the selected set, after a question"),
        Binding("d", "drain", "drain", tooltip="give out nothing more of the selected rank, after a question"),
        Binding("l", "journal", "journal", tooltip="the journal of the selected rank's unit"),
        Binding("escape", "clear", "end filter", key_display="esc", tooltip="end the filter"),
        *(
            Binding(str(n), f"rank({n})", "go to the rank with that number", show=False, key_display="0-9")
            for n in range(10)
        ),
    ]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        marks = state.marks
        self._tables = {
            "ranks": Table(rows.RANKS, marks, "no rank is configured or running on this host", id="ranks"),
            "slots": Table(slots.SLOTS, marks, "no engine has a standby", id="slots"),
            "sets": Table(rows.SETS, marks, "no weights are resident", id="sets"),
            "engines": Table(rows.ENGINES, marks, "no engine is attached", id="engines"),
            "events": Table(rows.EVENTS, marks, "nothing has happened yet", pinned=True, id="events"),
        }
        self._memory = Page(id="memory")
        first = {name: self._tables[name] for name in ("ranks", "slots")}
        self._parts: dict[str, Page | Table] = {**first, "memory": self._memory, **self._tables}
        self._field = Input(id="filter", compact=True, select_on_focus=False)
        self._field.display = False
        self._field.cursor_blink = False
        self._filtered: Table | None = None
        self._events: tuple[object, list[Row]] = (None, [])

    def body(self) -> ComposeResult:
        """The tables and the memory panel."""
        yield from self._parts.values()
        yield self._field

    def hidden(self) -> Collection[str]:
        """Without the right to evict and drain, their keys only say so."""
        return ("evict", "drain") if self.state.why_no_actions() else ()

    # -- what is selected ----------------------------------------------------------------------------------------------

    def _table(self, name: str) -> Table:
        return self._tables[name]

    @property
    def rank(self) -> int | None:
        """The selected rank's number."""
        return cast("int | None", self._table("ranks").key)

    @property
    def _view(self) -> RankView | None:
        return self.state.view(self.rank)

    @property
    def _side(self) -> Side | None:
        """The set that is meant: the selected engine's if the engines are in focus, else the selected one."""
        engines = self._table("engines")
        if self._focused is engines and (one := selection.engine(self.state, self.rank, engines.key)) and one.sets:
            return selection.side(self.state, (self.rank, one.sets[0].id))
        return selection.side(self.state, self._table("sets").key)

    @property
    def _focused(self) -> Table:
        return self.focused if isinstance(self.focused, Table) else self._filtered or self._table("ranks")

    # -- showing -------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show the state's snapshot."""
        super().show()
        self._table("ranks").show(rows.ranks(self.state.snapshot, self.state.seconds))
        self._table("slots").show(slots.rows(self.state.snapshot))
        self._show_rank()

    def _show_rank(self) -> None:
        state, view = self.state, self._view
        snapshot = state.snapshot
        self._memory.show(lambda width: memory.lines(snapshot, view, state.seconds, state.marks, width) if view else [])
        self._table("sets").show(rows.sets(snapshot, view) if view else [])
        self._table("engines").show(rows.engines(snapshot, view) if view else [])
        self._table("events").show(self._event_rows())
        self._share_height()

    def _event_rows(self) -> list[Row]:
        # Up to 200 rows that seldom change.
        at = self.state.snapshot.at
        made_for = (self.state.snapshot.events, self.rank, int(at // 3600))
        if self._events[0] != made_for:
            self._events = made_for, rows.events(self.state.snapshot.events, at, self.rank)
        return self._events[1]

    def _share_height(self) -> None:
        fixed = self.header.wanted(self.size.width) + 1 + self._field.display
        roomy = self.size.height >= ROOMY
        self.set_class(roomy, "roomy")
        wants = {name: self._parts[name].wanted(self.size.width) for name in IMPORTANCE}
        if not self.state.snapshot.standby:
            wants["slots"] = 0
        room = max(self.size.height - fixed - roomy * (4 + bool(wants["slots"])), 0)
        for name, height in share(room, wants, str(self._focused.id)).items():
            part = self._parts[name]
            part.display = height > 0
            part.styles.height = height

    def on_mount(self) -> None:
        """Begin with the ranks."""
        super().on_mount()
        self._table("ranks").focus()

    def on_resize(self) -> None:
        """Share the new height."""
        self._share_height()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Give the table in focus the room it wants."""
        if event.widget is not self._field:
            self._field.display = False
        self._share_height()
        self.show_keys()

    def on_table_moved(self, event: Table.Moved) -> None:
        """Show what belongs to the rank that is selected now."""
        if event.table.id == "ranks":
            self._show_rank()

    # -- keys ----------------------------------------------------------------------------------------------------------

    def on_table_opened(self, event: Table.Opened) -> None:
        """Show everything about the selected row."""
        find = selection.finder(str(event.table.id), self.rank, event.table.key)
        self.app.push_screen(Details(self.state, find))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Esc does something only where there is a filter, and / where none is typed."""
        typing = isinstance(self.focused, Input)
        if action == "clear":
            return typing or any(table.needle for table in self._tables.values())
        return not (action == "filter" and typing)

    def action_rank(self, number: int) -> None:
        """Select a rank by its number."""
        if not self._table("ranks").select(number):
            self.app.bell()

    def action_sort(self) -> None:
        """Sort the table in focus by its next column."""
        self._focused.sort_by_next()

    def action_reverse(self) -> None:
        """Reverse the table in focus."""
        self._focused.reverse()

    def action_filter(self) -> None:
        """Let the operator type what the rows of the table in focus are to contain."""
        self._filtered = self._focused
        field = self._field
        field.placeholder = f"show only {self._filtered.id} that contain..."
        field.value = self._filtered.needle
        field.display = True
        field.focus()
        self._share_height()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if self._filtered is not None and event.input.display:
            self._filtered.filter(event.value)
            self._show_rank()

    def on_input_submitted(self) -> None:
        """Back to the table."""
        (self._filtered or self._table("ranks")).focus()

    def action_clear(self) -> None:
        """End the filter that is typed, or that of the table in focus, or else all."""
        table = self._filtered if isinstance(self.focused, Input) else self._focused
        chosen = [table] if table and table.needle else list(self._tables.values())
        for one in chosen:
            one.filter("")
        if table is not None:
            table.focus()
        self._show_rank()

    def action_compare(self) -> None:
        """Choose another set, or an engine that was refused, then show both fingerprints."""
        left = self._side
        if left is None:
            requests.say(self.app, "compare: no set is selected")
            return
        sides = [side for side in selection.comparable(self.state) if side != left]
        others: list[comparison.Other] = [*comparison.refused(self.state.snapshot, left), *sides]
        if not others:
            requests.say(self.app, "compare: no other set, and no refused engine")
            return

        def chosen(right: comparison.Other | None) -> None:
            if right is not None:
                self.app.push_screen(Compare(self.state, left, right))

        listed = [comparison.row(left, right) for right in others]
        self.app.push_screen(Choose(others, listed, self.state.marks), chosen)

    def action_evict(self) -> None:
        """Ask, then drop the selected set."""
        requests.evict(self.app, self.state, self._side)

    def action_drain(self) -> None:
        """Ask, then drain the selected rank."""
        requests.drain(self.app, self.state, self._view)

    def action_journal(self) -> None:
        """The journal of the selected rank's unit, or the events that are known here."""
        requests.journal(self.app, self.state, self._view)
