"""The roster of a slot: its processes that may still write KV memory (docs/standby.md).

Its launcher alone writes it, and both slots' launchers read it. One that was written before this boot names nobody.
One that was written in another PID namespace says nothing about any process here, and is refused like one that cannot
be read: without a roster nobody may map the memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.errors import WeightcacheError
from weightcache.standby import files
from weightcache.standby.messages import Process

if TYPE_CHECKING:
    from collections.abc import Callable

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Roster:
    """``at``: when it was so, in seconds on CLOCK_MONOTONIC; 0 if nobody has written one since the host booted."""

    processes: tuple[Process, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _File:
    boot: str
    namespace: str
    processes: tuple[Process, ...]
    at: float


def read(path: Path) -> Roster:
    """What is written there; no file means nobody.

    Raises NoRoom for want of a descriptor, and another WeightcacheError for a file that nobody can rely on.
    """
    try:
        found = records.from_plain(_File, json.loads(files.read(path)))
    except FileNotFoundError:
        return Roster()
    except (ValueError, RecursionError):
        raise WeightcacheError(
            f"{path} is damaged, so that nobody can say which processes may still write KV memory: "
            "stop both slots of the engine, and remove it"
        ) from None
    if found.boot != _boot():
        return Roster()
    if found.namespace != _namespace():
        raise WeightcacheError(
            f"{path} was written in another PID namespace, from where its processes cannot be told: "
            "run both slots of an engine in one, or stop both and remove the file"
        )
    return Roster(found.processes, found.at)


def write(path: Path, roster: Roster) -> None:
    """Replace it, with each process once. Raises NoRoom for want of a descriptor, and another WeightcacheError."""
    file = _File(_boot(), _namespace(), tuple(dict.fromkeys(roster.processes)), roster.at)
    files.replace(path, json.dumps(records.to_plain(file)) + "\n")


def _boot() -> str:
    return _asked(_BOOT_ID, lambda: _BOOT_ID.read_text().strip())


def _namespace() -> str:
    return _asked(_NAMESPACE, lambda: str(_NAMESPACE.readlink()))


def _asked(path: Path, ask: Callable[[], str]) -> str:
    """What the kernel answers; whoever could not ask knows nothing about a roster, and says so."""
    try:
        return ask()
    except OSError as error:
        raise files.failed(path, "read", error) from None
