"""Engines that share a GPU: the more important one has its memory, and the others wait, parked, until it leaves.

Nothing is written down for that, and nobody has to clean up after a death: an engine counts as there while somebody has
byte 0 of its lock or the byte of one of its ranks, whatever became of its launchers. Who shares a GPU with whom, and
how important each one is, is in the status files of the slots. Engines of the same priority do not look at each other.

Byte 0 is taken before the others' bytes are read, by either side: of two engines that are elected at the same time, one
sees the other at least. What cannot be read of an engine makes it count as not there, and is said once: no engine ends
for what the files of another one are. Who has no descriptor left to look with knows nothing, and says that (NoRoom).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from weightcache.errors import NoRoom, UsageError, WeightcacheError
from weightcache.standby import files, locks, status
from weightcache.standby.messages import Role
from weightcache.standby.places import EnginePaths, SlotName, slot_name
from weightcache.standby.status import SlotStatus

MOST_ENGINES = 256
_LEAVES: tuple[Role, ...] = ("promoting", "retiring")
"""A promotion that is under way ends first, and its engine retires then."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """An engine that has memory, or is about to take it. ``leaving``: its launcher says that it goes on with something
    that ends by itself, so that it need not be hurried.
    """

    engine: str
    leaving: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """What an engine wants: its GPUs (UUIDs; "host" for memory of the host), the more of ``priority`` the better.

    ``complain`` gets a sentence about each engine that has to be passed over. Every method raises NoRoom when this
    process cannot look.
    """

    paths: EnginePaths
    gpus: frozenset[str]
    priority: int
    complain: Callable[[str], None] = lambda _: None
    _passed: set[str] = field(default_factory=set, compare=False)

    def more_important(self) -> str:
        """An engine that is there and comes first on one of these GPUs; empty if there is none."""
        for other in self._others():
            if other.priority > self.priority and self._there(other):
                return other.engine
        return ""

    def in_the_way(self) -> tuple[Blocker, ...]:
        """The less important engines that have KV memory on one of these GPUs, or could take it at any moment."""
        others = [other for other in self._others() if other.priority < self.priority and self._there(other)]
        return tuple(Blocker(other.engine, other.leaving) for other in others)

    def less_important(self) -> tuple[Path, ...]:
        """Where the launchers of less important engines on these GPUs take commands."""
        others = [other for other in self._others() if other.priority < self.priority]
        return tuple(self._of(other).control(slot) for other in others for slot in other.slots)

    def _of(self, other: _Other) -> EnginePaths:
        return EnginePaths(self.paths.directory, other.engine)

    def _there(self, other: _Other) -> bool:
        lock = self._of(other).lock
        try:
            return locks.is_taken(lock, 0, 1 + other.size)
        except NoRoom:
            raise
        except (WeightcacheError, OSError) as error:
            self._pass_over(other.engine, str(error))
            return False

    def _others(self) -> tuple[_Other, ...]:
        """Engines that share a GPU with this one."""
        found: dict[str, list[SlotStatus]] = {}
        for path in self._statuses()[:MOST_ENGINES]:
            if (said := self._said(path)) is not None:
                found.setdefault(said.engine, []).append(said)
        others = [_other(engine, said) for engine, said in found.items()]
        return tuple(other for other in others if self.gpus & other.gpus)

    def _statuses(self) -> list[Path]:
        try:
            return sorted(path for path in self.paths.directory.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        except OSError as error:
            problem = files.failed(self.paths.directory, "read", error)
            if isinstance(problem, NoRoom):
                raise problem from None
            self._pass_over("every other engine", problem.message)
            return []

    def _said(self, path: Path) -> SlotStatus | None:
        """What a launcher of another engine says, or said last, under its own name."""
        try:
            name = slot_name(path.stem)
        except UsageError:
            return None
        if name.engine == self.paths.engine:
            return None
        try:
            found = status.load(path)
        except NoRoom:
            raise
        except WeightcacheError as error:
            self._pass_over(str(name), error.message)
            return None
        return found if found is not None and SlotName(found.engine, found.slot) == name else None

    def _pass_over(self, who: str, problem: str) -> None:
        if who not in self._passed:
            self._passed.add(who)
            self.complain(f"{who} is passed over where priorities count: {problem}")


@dataclass(frozen=True, slots=True)
class _Other:
    engine: str
    gpus: frozenset[str]
    priority: int
    size: int
    slots: tuple[str, ...]
    leaving: bool


def _other(engine: str, said: list[SlotStatus]) -> _Other:
    # Who died may have been started with another file; without any launcher, its last words are all that is known.
    known = [one for one in said if one.role != "down"] or said
    return _Other(
        engine,
        frozenset(gpu for one in known for gpu in one.gpus),
        max(one.priority for one in known),
        max(one.size for one in said),
        tuple(one.slot for one in known),
        any(one.role in _LEAVES for one in known),
    )
