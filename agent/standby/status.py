"""NAME-a.json and NAME-b.json: what the launcher of a slot last said, for everybody who reads it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weightcache import records
from weightcache.errors import WeightcacheError
from weightcache.standby import fence, files
from weightcache.standby.messages import Process, Role

MOST_PROMOTIONS = 20
MOST_RANKS = 1024
"""Of an engine, all of them on one host."""
MODE = 0o644
"""Who watches is in no group that may do anything. Neither arguments nor environments are in it."""

Cause = Literal["start", "death", "promote", "wake"]
"""Why an engine was promoted: none was active since the slots started, the active one died, or somebody asked."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """One that ended well. ``at`` is when (seconds since 1970), ``seconds`` how long it took, ``phases`` by step."""

    at: float
    seconds: float
    cause: Cause
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A slot and its engine. ``since``: seconds since 1970, when it took its role. ``listen``: HOST:PORT.

    ``restarts`` counts the engines that this launcher has started again. ``problem`` is one sentence, or empty.
    ``memory``: bytes on all its GPUs together, None where nobody has measured. ``promotions``: the newest last, and
    ``promoted``: how many there ever were, by cause.
    ``gpus``: UUIDs, "host" without GPUs. ``size``: how many ranks the engine has.
    """

    engine: str
    slot: str
    role: Role
    since: float
    launcher: Process
    main: Process | None = None
    ranks: tuple[Process, ...] = ()
    priority: int = 0
    model: str = ""
    listen: str = ""
    restarts: int = 0
    problem: str = ""
    memory: int | None = None
    promotions: tuple[Promotion, ...] = ()
    promoted: dict[str, int] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    size: int = 0
    schema: Literal[1] = 1


def write(path: Path, status: SlotStatus) -> None:
    """Replace the file, which everybody may read. Raises WeightcacheError."""
    status = dataclasses.replace(status, promotions=status.promotions[-MOST_PROMOTIONS:])
    files.replace(path, json.dumps(records.to_plain(status), indent=1) + "\n", MODE)


def read(path: Path) -> tuple[SlotStatus | None, str]:
    """The status, or None with the reason in one sentence; no file has none. The role is "down" without a launcher."""
    try:
        return load(path), ""
    except WeightcacheError as error:
        return None, error.message


def load(path: Path) -> SlotStatus | None:
    """As ``read``. Raises NoRoom for want of a descriptor, and another WeightcacheError for what is wrong with it."""
    try:
        status = records.from_plain(SlotStatus, json.loads(files.read(path)))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise WeightcacheError(f"{path} says nothing that this version understands ({str(error)[:200]})") from None
    if not 0 <= status.size <= MOST_RANKS:
        raise WeightcacheError(f"{path} says nothing that this version understands ({status.size} ranks)")
    try:
        alive = status.role != "down" and fence.lives(status.launcher)
    except OverflowError as error:
        raise WeightcacheError(f"whether the launcher of {path} lives cannot be told ({str(error)[:200]})") from None
    except OSError as error:
        raise files.failed(path, "checked for a launcher that lives", error) from None
    return status if alive else dataclasses.replace(status, role="down", main=None, ranks=(), memory=None)
