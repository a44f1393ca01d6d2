"""Evict, drain and journal, from the key to the sentence that says how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.app import App

from weightcache.tui import actions, facts
from weightcache.tui.screens.details import Details
from weightcache.tui.screens.dialogs import Confirm

if TYPE_CHECKING:
    from weightcache.monitor.view import RankView
    from weightcache.tui.comparison import Side
    from weightcache.tui.facts import Fact
    from weightcache.tui.state import State
    from weightcache.tui.widgets.page import Build

SHOWN_SECONDS = 8.0


def say(app: App[Any], sentence: str, well: bool = True) -> None:
    """Show a sentence for a while, without markup."""
    app.notify(sentence, severity="information" if well else "error", markup=False, timeout=SHOWN_SECONDS)


def evict(app: App[Any], state: State, side: Side | None) -> None:
    """Ask, then drop a set."""
    view = state.view(side.rank) if side else None
    if state.site is None or state.readonly:
        say(app, f"evict: {state.why_no_actions()}")
    elif side is None or view is None:
        say(app, "evict: no set is selected")
    else:
        site, rank, entry = state.site, side.rank, side.entry
        about: Build = lambda width: actions.about_evict(view, entry, width)  # noqa: E731
        _confirm(app, about, lambda done: actions.evict(site, rank, entry.id, done))


def drain(app: App[Any], state: State, view: RankView | None) -> None:
    """Ask, then drain a rank."""
    if state.site is None or state.readonly:
        say(app, f"drain: {state.why_no_actions()}")
    elif view is None:
        say(app, "drain: no rank is selected")
    elif view.status.drained is not None:
        say(app, f"rank {view.status.rank} is drained already; wcache resume --rank {view.status.rank} ends it")
    else:
        site, rank = state.site, view.status.rank
        about: Build = lambda width: actions.about_drain(view, width)  # noqa: E731
        _confirm(app, about, lambda done: actions.drain(site, rank, done))


def _confirm(app: App[Any], about: Build, act: Callable[[actions.Done], None]) -> None:
    def told(sentence: str, well: bool) -> None:
        """Called by the thread that asked the agent; the screen may have been left meanwhile."""
        if app.is_running:
            app.call_from_thread(say, app, sentence, well)

    def answered(yes: bool | None) -> None:
        if yes:
            act(told)

    app.push_screen(Confirm(about), answered)


def journal(app: App[Any], state: State, view: RankView | None) -> None:
    """The journal of a rank's unit in a pager; where there is none, the events that are known here."""
    if view is None:
        say(app, "journal: no rank is selected")
        return
    rank = view.status.rank
    command = actions.journal(state.site, rank)
    if command is not None and actions.show(app, command):
        return
    why = "a pager cannot be shown here" if command else "no unit's journal can be expected here"

    def find(state: State) -> list[Fact]:
        return facts.of_events(state.snapshot.events, rank, state.snapshot.at, f"{why}: this is what the agent told")

    app.push_screen(Details(state, find))
