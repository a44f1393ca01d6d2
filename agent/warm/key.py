"""What has to be as it was when a tree was parked: otherwise its imports would have come out otherwise. Stdlib only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIVEN_LATER = {
    "WEIGHTCACHE_DIRECTIVE": "made anew for each launch; the plugin reads it when SGLang loads plugins, which a parked "
    "process has not done",
}
"""Variables that a parked process does not have, and gets with the launch. The value says why that is right."""
MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Key:
    """One launch, as far as parked processes depend on it. ``cpus`` are those that its processes may use."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    directory: str
    cpus: frozenset[int]

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str]) -> Key:
        """The key of a launch by this process, now."""
        kept = parked(environment)
        return cls(tuple(command), tuple(sorted(kept.items())), str(Path.cwd()), frozenset(os.sched_getaffinity(0)))

    def difference(self, now: Key) -> str:
        """Why a tree that was parked under this key cannot take a launch under ``now``; empty if it can."""
        if self.command != now.command:
            return "its command line is another one"
        if names := changed(dict(self.environment), dict(now.environment)):
            return f"the environment differs in {listed(names)}"
        if self.directory != now.directory:
            return f"it was parked in another directory ({self.directory})"
        return "" if self.cpus == now.cpus else "it was parked on other processors"


def parked(environment: Mapping[str, str]) -> dict[str, str]:
    """What a parked process gets of a launch's environment."""
    return {name: value for name, value in environment.items() if name not in GIVEN_LATER}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names that are not the same in both."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def listed(names: Sequence[str]) -> str:
    """Some names, for a sentence."""
    more = len(names) - MOST_NAMES
    text = ", ".join(names[:MOST_NAMES])
    return f"{text} and {more} more" if more > 0 else text
