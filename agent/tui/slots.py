"""Engines with a standby: the rows of their table, and everything about one slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache import text
from weightcache.monitor import standby
from weightcache.tui import words
from weightcache.tui.cells import Cell, safe
from weightcache.tui.widgets.columns import Column
from weightcache.tui.widgets.table import Row

if TYPE_CHECKING:
    from collections.abc import Hashable

    from weightcache.monitor.snapshot import Snapshot
    from weightcache.standby.listing import EngineView, SlotView
    from weightcache.tui.facts import Fact

SLOTS = (
    Column("SLOT", most=24),
    Column("ROLE"),
    Column("FOR", drop=3, right=True),
    Column("PID", drop=4, right=True),
    Column("RESTARTS", drop=2, right=True),
    Column("PROMOTED IN", drop=1, right=True),
    Column("AGO", drop=5, right=True),
    Column("MEMORY", drop=6, right=True),
    Column("MODEL", least=12, tail=True),
)

_STYLES = {"active": "good", "standby": "good", "down": "bad", standby.UNKNOWN: "bad"}


def rows(snapshot: Snapshot) -> list[Row]:
    """Two rows an engine. What is wrong stands where the model would: there is little room, and more to do about it."""
    return [_row(snapshot, engine, slot) for engine in snapshot.standby for slot in engine.slots]


def name(engine: EngineView, slot: SlotView) -> str:
    """NAME-a or NAME-b."""
    return f"{safe(engine.engine)}-{safe(slot.slot)}"


def of_process(snapshot: Snapshot) -> dict[int, str]:
    """By pid, the slot that a process belongs to, with its role."""
    found = standby.slots_by_pid(snapshot.standby)
    return {pid: f"{name(engine, slot)} ({slot.role})" for pid, (engine, slot) in found.items()}


def _row(snapshot: Snapshot, engine: EngineView, slot: SlotView) -> Row:
    status, role = slot.status, standby.role(slot)
    problem = safe(slot.problem or engine.problem)
    last = slot.last
    cells = (
        Cell(name(engine, slot)),
        Cell(role, _STYLES.get(role, "busy")),
        words.known(standby.since(slot, snapshot.at)),
        words.number(status.main.pid if status and status.main else None),
        words.number(status.restarts if status else None),
        Cell(standby.took(last), order=last.seconds) if last else words.NONE,
        words.known(snapshot.at - last.at if last else None),
        words.bytes_of(status.memory if status else None),
        Cell(problem, "bad") if problem else Cell(safe(engine.model)) if engine.model else words.NONE,
    )
    return Row(("slot", engine.engine, slot.slot), cells, dim=role == "down")


def facts(snapshot: Snapshot, key: Hashable) -> list[Fact] | None:
    """Everything about the slot of a row; None when it is gone."""
    pairs = ((engine, slot) for engine in snapshot.standby for slot in engine.slots)
    found = next((pair for pair in pairs if ("slot", pair[0].engine, pair[1].slot) == key), None)
    return _facts(snapshot, *found) if found else None


def _facts(snapshot: Snapshot, engine: EngineView, slot: SlotView) -> list[Fact]:
    status, role = slot.status, standby.role(slot)
    seconds = standby.since(slot, snapshot.at)
    facts: list[Fact] = [
        (f"Slot {name(engine, slot)}", ""),
        ("role", Cell(role, _STYLES.get(role, "busy"))),
        *([("problem", Cell(safe(slot.problem), "bad"))] if slot.problem else []),
        ("for", "-" if seconds is None else text.duration(seconds)),
        ("model", safe(engine.model) or "-"),
        ("listens at", safe(engine.listen) or "-"),
        ("priority", str(engine.priority)),
        ("parked", "yes: wcache wake ends it" if engine.parked else "no"),
        *([("file", Cell(safe(engine.problem), "bad"))] if engine.problem else []),
    ]
    if status is None:
        return facts
    facts += [
        ("Processes", ""),
        ("launcher", str(status.launcher.pid)),
        ("main process", str(status.main.pid) if status.main else "-"),
        ("ranks", ", ".join(str(process.pid) for process in status.ranks) or "-"),
        ("memory", words.bytes_of(status.memory).text),
        ("restarts", str(status.restarts)),
        ("Promotions", ""),
        ("so far", ", ".join(f"{safe(cause)} {count}" for cause, count in sorted(status.promoted.items())) or "none"),
    ]
    for one in reversed(status.promotions):
        phases = ", ".join(f"{safe(phase)} {took:.2f}" for phase, took in one.phases.items())
        facts.append((text.moment(one.at), f"{one.cause}, {one.seconds:.2f} s" + (f" ({phases})" if phases else "")))
    return facts
