"""From the keys of selected rows to what they stand for in the state of now."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from weightcache.tui import facts, slots
from weightcache.tui.attached import Attached, attached
from weightcache.tui.comparison import Side
from weightcache.tui.rows import event_key

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import RankEvent
    from weightcache.tui.facts import Fact
    from weightcache.tui.state import State

Find = Callable[["State"], "list[Fact] | None"]
"""The facts of a thing as a state has them; None when it is gone."""


def side(state: State, key: Hashable) -> Side | None:
    """The set of a row of the sets' table."""
    return next((side for side in comparable(state) if (side.rank, side.entry.id) == key), None)


def comparable(state: State) -> list[Side]:
    """All resident sets of this host."""
    return [Side(view.status.rank, entry) for view in state.snapshot.ranks for entry in view.status.sets]


def engine(state: State, rank: int | None, key: Hashable) -> Attached | None:
    """The engine of a row of the engines' table."""
    view = state.view(rank)
    found = attached(view.status) if view else []
    return next((one for one in found if (rank, str(one.lease.pid)) == key), None)


def event(state: State, key: Hashable) -> RankEvent | None:
    """The event of a row of the events' table."""
    return next((one for one in state.snapshot.events if event_key(one) == key), None)


def finder(table: str, rank: int | None, key: Hashable) -> Find:
    """How to find the facts of the row ``key`` of ``table``, now and at every later moment."""

    def find(state: State) -> list[Fact] | None:
        snapshot, view = state.snapshot, state.view(rank)
        if table == "events":
            return facts.of_event(happened) if (happened := event(state, key)) else None
        if table == "slots":
            return slots.facts(snapshot, key)
        if view is None:
            return None
        if table == "sets":
            return facts.of_set(snapshot, view, found.entry) if (found := side(state, key)) else None
        if table == "engines":
            return facts.of_engine(snapshot, view, one) if (one := engine(state, rank, key)) else None
        return facts.of_rank(snapshot, view, state.seconds)

    return find
