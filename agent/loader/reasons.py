"""Why a load failed, told by whichever of its processes knows first to the loader's parent, and to the other ranks.

A file, because its writer may be killed in the next moment. When one rank fails, all others fail for it, in words about
a closed connection: the first reason stays, except that a cause takes the place of what may be a consequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightcache import records
from weightcache.errors import LoadFailed, NoRoom, WeightcacheError, from_code

VARIABLE = "WEIGHTCACHE_REASON"
"""The file's path."""
WAIT_VARIABLE = "WEIGHTCACHE_REASON_SECONDS"
"""How long a rank that fails with what may be a consequence waits for the cause; absent where it is alone."""
CAUSE_SECONDS = 3.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Reason:
    """``own``: it is a cause, and no consequence of something that happened elsewhere."""

    code: str
    message: str
    own: bool

    def error(self) -> WeightcacheError:
        """The error that it stands for."""
        return from_code(self.code, self.message)


def of(error: BaseException) -> Reason:
    """The reason that an exception is. What has no better name may come from a peer that went away."""
    if isinstance(error, WeightcacheError):
        return Reason(error.code, error.message, own=error.code != LoadFailed.code)
    # torch.OutOfMemoryError, under whichever name this torch has it.
    kind = NoRoom if "OutOfMemory" in type(error).__name__ else LoadFailed
    first = (str(error).strip().splitlines() or [""])[0][:500]
    return of(kind(f"loading failed: {type(error).__name__}: {first}"))


def leave(reason: Reason, path: Path | None = None) -> None:
    """Say it at ``path``, or where this process's parent looks for it, if it does. Never raises."""
    if path is None:
        if not os.environ.get(VARIABLE):
            return
        path = Path(os.environ[VARIABLE])
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(records.to_plain(reason)))
        try:
            os.link(draft, path)  # whole, and only for the first
        except FileExistsError:
            if reason.own and not ((before := found(path)) and before.own):
                draft.replace(path)


def found(path: Path) -> Reason | None:
    """What was left at ``path``, if anything was."""
    try:
        return records.from_plain(Reason, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def settled(error: WeightcacheError, environment: Mapping[str, str] = os.environ) -> WeightcacheError:
    """What a rank should tell its agent for ``error``: the cause, if that turns up within some seconds."""
    reason = of(error)
    leave(reason)
    if reason.own or not environment.get(VARIABLE):
        return error
    deadline = time.monotonic() + float(environment.get(WAIT_VARIABLE, "0"))
    while True:
        if (known := found(Path(environment[VARIABLE]))) and known.own:
            return known.error()
        if time.monotonic() >= deadline:
            return error
        time.sleep(LOOK_SECONDS)
