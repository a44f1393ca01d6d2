"""The states of a rank, as pure functions of facts: nothing is remembered here, so nothing can go out of step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0


class State(enum.StrEnum):
    """What a rank is doing; ``stopped`` appears in the status file only."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    DRAINED = "drained"
    FAILED = "failed"
    DEGRADED = "degraded"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that decides the state of a rank."""

    drained: bool = False
    damaged: bool = False
    loading: bool = False
    resident: bool = False
    failed: bool = False


def state_of(facts: Facts) -> State:
    """The state that these facts add up to.

    An operator's drain is stronger than everything else. A rank that holds a good set is ready even when its
    configuration is broken: an error must never take resident weights away.
    """
    match facts:
        case Facts(drained=True):
            return State.DRAINED
        case Facts(damaged=True):
            return State.DEGRADED
        case Facts(loading=True):
            return State.LOADING
        case Facts(resident=True):
            return State.READY
        case Facts(failed=True):
            return State.FAILED
    return State.EMPTY


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to leave a failing load alone: 1 s, doubling with each failure in a row up to 60 s."""

    failures: int = 0
    until: float = 0.0

    def after_failure(self, now: float) -> Backoff:
        """One more failure at ``now`` (time.monotonic())."""
        delay = min(FIRST_DELAY * 2 ** min(self.failures, 16), LONGEST_DELAY)
        return Backoff(self.failures + 1, now + delay)

    def left(self, now: float) -> float:
        """Seconds until the next try is allowed; 0 means now."""
        return max(self.until - now, 0.0)
