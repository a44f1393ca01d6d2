"""All engines with a standby of this host: what their files and their launchers' status files say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weightcache.errors import ConfigError, UsageError
from weightcache.standby import engine_config, status
from weightcache.standby.messages import Role
from weightcache.standby.places import SLOTS, EnginePaths, slot_name
from weightcache.standby.status import Promotion, SlotStatus


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot. ``status`` is what its launcher last said; ``problem`` one sentence, or empty."""

    slot: str
    role: Role
    status: SlotStatus | None
    problem: str

    @property
    def hidden(self) -> bool:
        """Whether there is a status that cannot be read or understood, so that ``role`` says nothing."""
        return self.status is None and bool(self.problem)

    @property
    def last(self) -> Promotion | None:
        """The last promotion that is known."""
        return self.status.promotions[-1] if self.status and self.status.promotions else None


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine with both slots. ``problem``: what is wrong with its file, so that no slot could start, or empty."""

    engine: str
    listen: str
    model: str
    priority: int
    parked: bool
    problem: str
    slots: tuple[SlotView, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of slots a and b."""
        return tuple(slot.role for slot in self.slots)

    def slot_in(self, *roles: Role) -> SlotView | None:
        """The first slot that has one of ``roles``."""
        return next((slot for slot in self.slots if slot.role in roles), None)


def all_engines(directory: Path) -> tuple[EngineView, ...]:
    """Those with a file, and those that have a status below ``directory`` all the same. Raises ConfigError."""
    found, problem = known_engines(directory)
    if problem:
        raise ConfigError(problem)
    return found


def known_engines(directory: Path) -> tuple[tuple[EngineView, ...], str]:
    """The same, as far as they can be found, and in one sentence why some may be missing, or nothing.

    Who may enter ``directory``, and not list it, finds those with a file.
    """
    names, problem = engine_config.look()
    found = set(names)
    try:
        files = [path.stem for path in directory.iterdir() if path.suffix == ".json"]
    except OSError:
        files = []
    for name in files:
        try:
            found.add(slot_name(name).engine)
        except UsageError:
            continue
    return tuple(look(EnginePaths(directory, name)) for name in sorted(found)), problem


def look(paths: EnginePaths) -> EngineView:
    """One engine, whether it has a file or not."""
    slots = tuple(_slot(paths, slot) for slot in SLOTS)
    parked = os.path.lexists(paths.parked)
    try:
        config = engine_config.load(paths.engine)
    except ConfigError as error:
        known = next((slot.status for slot in slots if slot.status), None)
        listen, model, priority = (known.listen, known.model, known.priority) if known else ("", "", 0)
        return EngineView(paths.engine, listen, model, priority, parked, error.message, slots)
    return EngineView(paths.engine, config.listen, config.model, config.engine.priority, parked, "", slots)


def _slot(paths: EnginePaths, slot: str) -> SlotView:
    found, problem = status.read(paths.status(slot))
    if found is None:
        return SlotView(slot, "down", None, problem)
    return SlotView(slot, found.role, found, found.problem)
