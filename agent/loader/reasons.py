"""Why a load failed, told by whichever of its processes knows first to the loader's parent.

A file, because its writer may be killed in the next moment. The first reason stays: when one rank fails, the others
fail for it, in words about a closed connection.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from weightcache import records
from weightcache.errors import LoadFailed, NoRoom, WeightcacheError

VARIABLE = "WEIGHTCACHE_REASON"
"""The file's path."""


@dataclass(frozen=True, slots=True)
class Reason:
    """``own``: it is a cause, and no consequence of something that happened elsewhere."""

    code: str
    message: str
    own: bool


def of(error: BaseException) -> Reason:
    """The reason that an exception is; any but weightcache's own may come from a peer that went away."""
    if isinstance(error, WeightcacheError):
        return Reason(error.code, error.message, own=True)
    # torch.OutOfMemoryError, under whichever name this torch has it.
    memory = "OutOfMemory" in type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0][:500]
    kind = NoRoom if memory else LoadFailed
    return Reason(kind.code, f"loading failed: {type(error).__name__}: {first}", own=memory)


def leave(reason: Reason) -> None:
    """Say it, if this process has a parent that wants to know and nobody was faster. Never raises."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    draft = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(records.to_plain(reason)))
        os.link(draft, path)  # whole, and only for the first


def found(path: Path) -> Reason | None:
    """What was left at ``path``, if anything was."""
    try:
        return records.from_plain(Reason, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
