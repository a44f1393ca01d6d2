"""Engines with a standby as an observer sees them: what their launchers last wrote down."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightcache.standby import listing
from weightcache.text import count, duration, escape

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from weightcache.standby.listing import EngineView, SlotView
    from weightcache.standby.status import Promotion

UNKNOWN = "unknown"
LOOK_SECONDS = 0.5
"""The files are read at most this often, however many ask."""


class Standby:
    """Looks at the files of the engines in ``directory``; None: there are none to look at."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._looked = -LOOK_SECONDS
        self._found: tuple[tuple[EngineView, ...], str] = ((), "")

    def now(self) -> tuple[tuple[EngineView, ...], str]:
        """All engines, and in one sentence what is wrong with their directory, or nothing."""
        if self._directory is not None and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._found = look(self._directory)
        return self._found


def look(directory: Path) -> tuple[tuple[EngineView, ...], str]:
    """The same, at once."""
    try:
        return listing.known_engines(directory)
    except Exception as error:  # noqa: BLE001 - whatever somebody wrote there, the ranks are still to be seen
        return (), f"engines with a standby cannot be looked at ({type(error).__name__}: {error})"


def role(slot: SlotView) -> str:
    """The slot's role, or UNKNOWN where its file cannot be read."""
    return UNKNOWN if slot.hidden else slot.role


def slots_by_pid(engines: Iterable[EngineView]) -> dict[int, tuple[EngineView, SlotView]]:
    """The slots by the processes of their engines."""
    return {
        process.pid: (engine, slot)
        for engine in engines
        for slot in engine.slots
        if slot.status
        for process in (*slot.status.ranks, *([slot.status.main] if slot.status.main else []))
    }


def since(slot: SlotView, now: float) -> float | None:
    """For how many seconds the slot has had its role; None where nobody knows."""
    return None if slot.status is None or slot.role == "down" else now - slot.status.since


def took(last: Promotion) -> str:
    """How long a promotion took, and why it was one."""
    return f"{f'{last.seconds:.2f} s' if abs(last.seconds) < 10 else duration(last.seconds)} ({last.cause})"


def lines(engines: Iterable[EngineView], now: float) -> list[str]:
    """For people: a line a slot, and the sentences about what is wrong."""
    found = []
    for engine in engines:
        name = escape(engine.engine)
        if engine.parked:
            found.append(f"engine {name}: parked; `wcache wake {name}` ends it")
        if engine.problem:
            found.append(f"engine {name}: {escape(engine.problem)}")
        for slot in engine.slots:
            found.append(f"slot {name}-{escape(slot.slot)}: {_slot(slot, now)}")
            if slot.problem:
                found.append(f"slot {name}-{escape(slot.slot)}: {escape(slot.problem)}")
    return found


def _slot(slot: SlotView, now: float) -> str:
    parts = [role(slot)]
    if (seconds := since(slot, now)) is not None:
        parts[0] += f" for {duration(seconds)}"
    if slot.status and slot.status.main:
        parts.append(f"pid {slot.status.main.pid}")
    if slot.status and slot.status.restarts:
        parts.append(count(slot.status.restarts, "restart"))
    if slot.last:
        parts.append(f"promoted in {took(slot.last)} {duration(now - slot.last.at)} ago")
    return ", ".join(parts)
