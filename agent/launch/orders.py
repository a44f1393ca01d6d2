"""The steps that a slot's engine goes through, and the orders that have no answer yet."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcache.standby.messages import Order, Role

MAIN = -1
"""The main process's number among the ranks, as in messages.Joined."""


class Step(enum.Enum):
    """Where an engine is; the order that is not answered yet, in most of them."""

    STARTING = "until every process is ready"
    RESTING = "no order"
    ELECTING = "Elect"
    REFUSING = "Yield, since the engine is parked"
    CLEARING = "until less important engines have given back their memory"
    OWNING = "Own"
    ACCEPTING = "Accept"
    ACTIVE = "accepts, no order"
    DRAINING = "Retire"
    RELEASING = "Release"
    YIELDING = "Yield"
    ENDED = "is being killed"


_ROLES: dict[Step, Role] = {
    Step.STARTING: "starting",
    Step.CLEARING: "promoting",
    Step.OWNING: "promoting",
    Step.ACCEPTING: "promoting",
    Step.ACTIVE: "active",
    Step.DRAINING: "retiring",
    Step.RELEASING: "retiring",
    Step.YIELDING: "retiring",
    Step.ENDED: "starting",
}


def role(step: Step, parked: bool, leaving: bool) -> Role:
    """What an engine at this step is called. ``leaving``: it has given the lock back, and nobody has taken it yet."""
    if found := _ROLES.get(step):
        return found
    if parked:
        return "parked"
    return "retiring" if leaving else "standby"


@dataclass(frozen=True, slots=True)
class Asked:
    """An order that was given. ``seconds``: how long it may take."""

    rank: int
    name: str
    seconds: float
    deadline: float


@dataclass(slots=True)
class Pending:
    """The orders that were given and not answered."""

    _asked: dict[int, Asked] = field(default_factory=dict)
    _last: int = 0

    def __bool__(self) -> bool:
        return bool(self._asked)

    def number(self) -> int:
        """A new order's."""
        self._last += 1
        return self._last

    def given(self, rank: int, order: Order, seconds: float, now: float) -> None:
        """The order goes to that process."""
        self._asked[order.order] = Asked(rank, type(order).__name__, seconds, now + seconds)

    def answered(self, rank: int, number: int) -> Asked | None:
        """The order that is done by this answer; None if that process was given no such order."""
        asked = self._asked.get(number)
        if asked is None or asked.rank != rank:
            return None
        return self._asked.pop(number)

    def late(self, now: float) -> Asked | None:
        """One whose time is over."""
        return next((asked for asked in self._asked.values() if now >= asked.deadline), None)

    def due(self) -> float:
        """When the first one's time is over."""
        return min((asked.deadline for asked in self._asked.values()), default=math.inf)
