"""How many bytes of KV memory both slots of an engine have: planned once, by the first one that starts.

A standby could not measure it beside an active engine.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcache.engine import adapter, adapter_kv as sglang
from weightcache.errors import WeightcacheError
from weightcache.standby import files
from weightcache.standby.locks import ByteLock, is_taken

logger = logging.getLogger(__name__)

PLAN_BYTE = 1 << 20
"""Of the lock file: who measures."""
MEASURE_SECONDS = 300.0
POLL_SECONDS = 0.1
_ENDLESS, _ACTIVE = -1, -2
_PROBLEMS = {
    _ENDLESS: "another engine of this name measures its KV memory, and does not come to an end",
    _ACTIVE: "there is no plan of KV memory, and none can be measured beside an active engine of this name: "
    "stop that one, or set kv_gigabytes",
}
"""In place of bytes, what the first rank says to all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the slots of an engine agree on: the bytes of their KV memory on each GPU.

    ``file`` has them, and ``lock`` is the engine's lock file. ``reserve_bytes`` are left free for the other slot. With
    ``kv_bytes`` there is nothing to measure and to agree on. ``engine`` stands for all that its file says of it.
    """

    file: Path
    lock: Path
    reserve_bytes: int = 0
    kv_bytes: int = 0
    engine: str = ""

    def budget(self, configurator: Any, measure: Callable[[], int]) -> int:
        """The bytes for this engine on all ranks, of those that ``measure`` finds free. Raises WeightcacheError."""
        if self.kv_bytes:
            return self.kv_bytes
        key = [*sglang.plan_key(configurator), f"reserve_bytes={self.reserve_bytes}", f"engine={self.engine}"]
        return planned(self.file, self.lock, key, lambda: measure() - self.reserve_bytes)


def planned(plan: Path, lock: Path, key: list[str], measure: Callable[[], int]) -> int:
    """The bytes of this engine's KV pool: as planned, or measured now and written to ``plan``; the same on all ranks.

    Nothing is measured beside an active engine, since what it leaves is not what there is: a plan for other arguments
    counts as long as there is one, and without a plan this engine does not start. Raises WeightcacheError.
    """
    first = adapter.world()[0] == 0
    turn = ByteLock(lock, PLAN_BYTE) if first else None
    try:
        known = _known(plan, lock, key, turn) if turn else 0
        # What the first rank found is what all go by: measuring is a collective.
        if (known := sglang.from_first_rank(known)) in _PROBLEMS:
            raise WeightcacheError(_PROBLEMS[known])
        if known:
            return known
        found = measure()
        # Asked again: one that was parked may have taken its memory meanwhile.
        if sglang.from_first_rank(int(first and is_taken(lock, 0))):
            raise WeightcacheError(_PROBLEMS[_ACTIVE])
        if found <= 0:
            raise WeightcacheError("no GPU memory is left for KV memory beside what a standby needs")
        if first:
            files.replace(plan, json.dumps({"key": key, "bytes": found}))
            logger.info("weightcache: the KV memory of both slots is planned with %.2f GB", found / 1e9)
        return found
    finally:
        if turn:
            turn.close()


def _known(plan: Path, lock: Path, key: list[str], turn: ByteLock) -> int:
    """The bytes of a plan that counts, 0 if they have to be measured now, or one of _PROBLEMS."""
    deadline = time.monotonic() + MEASURE_SECONDS
    while not turn.try_take():
        if time.monotonic() > deadline:
            return _ENDLESS
        time.sleep(POLL_SECONDS)
    found, size = _read(plan)
    if size and found == key:
        return size
    if is_taken(lock, 0):
        return size or _ACTIVE
    return 0


def _read(plan: Path) -> tuple[object, int]:
    """What the plan is for, and its bytes: 0 if there is none that makes sense."""
    try:
        body = json.loads(files.read(plan))
        found, size = body["key"], body["bytes"]
    except (OSError, ValueError, TypeError, KeyError, WeightcacheError):
        return None, 0
    good = isinstance(size, int) and not isinstance(size, bool) and size > 0
    return found, size if good else 0
