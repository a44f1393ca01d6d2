"""Names of engines and slots, and where their files are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from weightcache.errors import UsageError
from weightcache.paths import own_directory, runtime_dir

CONFIG_DIR = Path("/etc/weightcache/engines")
SLOTS = ("a", "b")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,60}[A-Za-z0-9_])?")
"""Also a part of unit names and of paths."""


@dataclass(frozen=True, slots=True)
class SlotName:
    """One of an engine's two places, written NAME-a and NAME-b. Which of them is active changes."""

    engine: str
    slot: str

    def __str__(self) -> str:
        return f"{self.engine}-{self.slot}"

    @property
    def other(self) -> SlotName:
        """The engine's other place."""
        return SlotName(self.engine, SLOTS[1 - SLOTS.index(self.slot)])


def engine_name(text: str) -> str:
    """``text``, if it can name an engine. Raises UsageError."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"{text[:80]!r} cannot name an engine: letters, digits, '_', '-' and '.', at most 62 of them")
    return text


def slot_name(text: str) -> SlotName:
    """Parse NAME-a or NAME-b. Raises UsageError."""
    name, dash, slot = text.rpartition("-")
    if not dash or slot not in SLOTS:
        raise UsageError(f"{text[:80]!r} names no slot: an engine's slots are NAME-a and NAME-b")
    return SlotName(engine_name(name), slot)


def config_dir() -> Path:
    """$WEIGHTCACHE_ENGINES_DIR, or /etc/weightcache/engines."""
    return Path(os.environ.get("WEIGHTCACHE_ENGINES_DIR") or CONFIG_DIR)


@dataclass(frozen=True, slots=True)
class EnginePaths:
    """The files of one engine. ``directory`` is below a runtime directory; nothing in it is ever replaced or removed
    while an engine runs, but for what is written by rename.
    """

    directory: Path
    engine: str

    @classmethod
    def of(cls, engine: str) -> EnginePaths:
        """Below this user's, or the host's, runtime directory."""
        return cls(runtime_dir() / "engines", engine)

    def prepare(self) -> None:
        """Have the directory, which tmpfiles.d makes on a host, and this a user. Raises WeightcacheError, of which
        ConfigError is for what another user has made there.
        """
        own_directory(self.directory, 0o700)

    @property
    def lock(self) -> Path:
        """Byte 0: who accepts requests; byte 1 + rank: who owns that rank's KV memory. Never removed."""
        return self.directory / f"{self.engine}.lock"

    @property
    def plan(self) -> Path:
        """How many bytes of KV memory each of the engine's GPUs gives."""
        return self.directory / f"{self.engine}.plan"

    @property
    def parked(self) -> Path:
        """Exists while the engine is parked."""
        return self.directory / f"{self.engine}.parked"

    def status(self, slot: str) -> Path:
        """What a slot's launcher last said."""
        return self.directory / f"{self.engine}-{slot}.json"

    def roster(self, slot: str) -> Path:
        """The processes of a slot that may write KV memory. Its launcher alone writes it."""
        return self.directory / f"{self.engine}-{slot}.roster"

    def control(self, slot: str) -> Path:
        """Where a slot's launcher takes commands."""
        return self.directory / f"{self.engine}-{slot}.control"

    def private(self, slot: str) -> Path:
        """Where a slot's HTTP server listens as long as it is not the active one."""
        return self.directory / f"{self.engine}-{slot}.http"
