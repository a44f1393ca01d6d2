"""The roster: the processes of an engine's slots that may still write KV memory (docs/standby.md).

One that was written before this boot names nobody. One that was written in another PID namespace says nothing about
any process here, and is refused like one that cannot be read: without a roster nobody may map the memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcache import records
from weightcache.errors import WeightcacheError
from weightcache.standby import files
from weightcache.standby.messages import Process

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class _Roster:
    boot: str
    namespace: str
    processes: tuple[Process, ...]


def read(path: Path) -> tuple[Process, ...]:
    """Who is written there; no file means nobody. Raises a WeightcacheError for a file that nobody can rely on."""
    try:
        found = records.from_plain(_Roster, json.loads(files.read(path)))
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError):
        raise WeightcacheError(
            f"{path} is damaged, so that nobody can say which processes may still write KV memory: "
            "stop both slots of the engine, and remove it"
        ) from None
    if found.boot != _boot():
        return ()
    if found.namespace != _namespace():
        raise WeightcacheError(
            f"{path} was written in another PID namespace, from where its processes cannot be told: "
            "run both slots of an engine in one, or stop both and remove the file"
        )
    return found.processes


def write(path: Path, processes: Sequence[Process]) -> None:
    """Replace it by ``processes``, each once. Raises WeightcacheError."""
    roster = _Roster(_boot(), _namespace(), tuple(dict.fromkeys(processes)))
    files.replace(path, json.dumps(records.to_plain(roster)) + "\n")


def _boot() -> str:
    return _BOOT_ID.read_text().strip()


def _namespace() -> str:
    return str(_NAMESPACE.readlink())
