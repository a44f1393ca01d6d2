"""What the agent counts and times for its metrics, beside the events of its history. Nothing here costs anything."""

from __future__ import annotations

import bisect
import collections
import time
from typing import TYPE_CHECKING, Literal

from weightcache.status import ATTACH_BOUNDS, Measured

if TYPE_CHECKING:
    from weightcache.server.production import Production


class Measures:
    """One agent's life so far."""

    def __init__(self) -> None:
        self._started_at = self._leased_at = time.time()
        self._attaches = [0] * (len(ATTACH_BOUNDS) + 1)
        self._attach_seconds = 0.0
        self._loads: collections.Counter[str] = collections.Counter()
        self._load_seconds: collections.defaultdict[str, float] = collections.defaultdict(float)

    def attached(self, seconds: float) -> None:
        """An engine got its weights so long after it had asked, and no load or verification was waited for."""
        self._attaches[bisect.bisect_left(ATTACH_BOUNDS, seconds)] += 1
        self._attach_seconds += seconds

    def lease_ended(self) -> None:
        """An engine that used what is resident is gone."""
        self._leased_at = time.time()

    def load_ended(
        self, production: Production, result: Literal["published", "retained", "failed", "given-up"]
    ) -> None:
        """A load is decided."""
        self._loads[f"{production.source}:{result}"] += 1
        if result == "published":
            self._load_seconds[production.source] += production.seconds

    def now(self) -> Measured:
        """The measures as a record."""
        return Measured(
            started_at=self._started_at,
            leased_at=self._leased_at,
            attaches=tuple(self._attaches),
            attach_seconds=self._attach_seconds,
            loads=dict(self._loads),
            load_seconds=dict(self._load_seconds),
        )
