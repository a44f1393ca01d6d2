"""Engines that share a GPU: the more important one has its memory, and the others wait, parked, until it leaves.

Nothing is written down for that, and nobody has to clean up after a death: an engine counts as there while somebody has
byte 0 of its lock, and as without KV memory while nobody has the bytes of its ranks. Who shares a GPU with whom, and
how important each one is, is in the status files of the slots. Engines of the same priority do not look at each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightcache.errors import UsageError, WeightcacheError
from weightcache.standby import locks, status
from weightcache.standby.places import EnginePaths, slot_name
from weightcache.standby.status import SlotStatus

MOST_ENGINES = 256


@dataclass(frozen=True, slots=True)
class Claim:
    """What an engine wants: its GPUs (UUIDs; "host" for memory of the host), the more of ``priority`` the better."""

    paths: EnginePaths
    gpus: frozenset[str]
    priority: int

    def more_important(self) -> str:
        """An engine that is there and comes first on one of these GPUs; empty if there is none."""
        for other in self._others():
            if other.priority > self.priority and locks.is_taken(self._of(other).lock, 0):
                return other.engine
        return ""

    def in_the_way(self) -> tuple[str, ...]:
        """The less important engines that have KV memory on one of these GPUs."""
        found = []
        for other in self._others():
            if other.priority < self.priority:
                lock = self._of(other).lock
                if any(locks.is_taken(lock, 1 + rank) for rank in range(other.size)):
                    found.append(other.engine)
        return tuple(found)

    def less_important(self) -> tuple[Path, ...]:
        """Where the launchers of less important engines on these GPUs take commands."""
        others = [other for other in self._others() if other.priority < self.priority]
        return tuple(self._of(other).control(slot) for other in others for slot in other.slots)

    def _of(self, other: _Other) -> EnginePaths:
        return EnginePaths(self.paths.directory, other.engine)

    def _others(self) -> tuple[_Other, ...]:
        """Engines with a living launcher that share a GPU with this one."""
        found: dict[str, _Other] = {}
        for path in sorted(self.paths.directory.glob("*.json"))[:MOST_ENGINES]:
            said = _said(path)
            if said is None or said.engine == self.paths.engine or not self.gpus.intersection(said.gpus):
                continue
            before = found.get(said.engine)
            found[said.engine] = _Other(
                said.engine,
                max(said.priority, before.priority) if before else said.priority,
                max(said.size, before.size) if before else said.size,
                (*(before.slots if before else ()), said.slot),
            )
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class _Other:
    engine: str
    priority: int
    size: int
    slots: tuple[str, ...]


def _said(path: Path) -> SlotStatus | None:
    """A slot's status, if a launcher lives that says so under its own name."""
    try:
        name = slot_name(path.stem)
        found, _ = status.read(path)
    except (UsageError, WeightcacheError):
        return None
    if found is None or found.role == "down" or (found.engine, found.slot) != (name.engine, name.slot):
        return None
    return found
