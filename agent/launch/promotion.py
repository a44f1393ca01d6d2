"""What a promotion took, step by step, why it came, and the sentences about it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcache.standby.status import Promotion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightcache.standby.status import Cause

STEPS = {"lock": "lock", "fence": "fence", "map": "memory"}
"""What ranks say about Own, and how a sentence calls it: the byte was taken, the fence complete, the memory mapped."""
_MOST_STEPS = 16


@dataclass(slots=True)
class Trial:
    """A promotion under way, since the lock was taken."""

    began: float
    cause: Cause
    phases: dict[str, float] = field(default_factory=dict)
    _last: float = math.nan

    def __post_init__(self) -> None:
        self._last = self.began

    def reached(self, phase: str, now: float) -> None:
        """A step of the launcher's is over."""
        self.phases[phase] = round(max(now - self._last, 0.0), 6)
        self._last = now

    def steps(self, seconds: Mapping[str, float]) -> None:
        """A process said what its order took: the slowest one counts, since they work at the same time."""
        for name, took in list(seconds.items())[:_MOST_STEPS]:
            if name not in ("roster", "own", "accept") and took >= 0:
                self.phases[name] = max(self.phases.get(name, 0.0), round(took, 6))

    def promotion(self, now: float) -> Promotion:
        """It ended well."""
        return Promotion(time.time(), round(now - self.began, 6), self.cause, dict(self.phases))


def cause(left: bool, roster: float, stood: float, woken: float) -> Cause:
    """Why an engine is elected: whoever retires leaves an empty roster behind, and whoever dies does not.

    ``left``: somebody is in the roster that was written last. The others are ages in seconds: of that roster, of this
    engine's waiting for the lock, and of its being woken.
    """
    if left:
        return "death"
    if woken < roster:
        return "wake"
    return "promote" if roster < stood else "start"


def sentence(promotion: Promotion, predecessor: str) -> str:
    """How the engine became active. ``predecessor``: who was before, where somebody was."""
    steps = ", ".join(
        f"{text} {promotion.phases.get(name, 0.0):.2f}" for name, text in {**STEPS, "accept": "accept"}.items()
    )
    took = f"{promotion.seconds:.2f} s ({steps})"
    match promotion.cause:
        case "death" | "promote":
            return f"active: took over from {predecessor} in {took}"
        case "wake":
            return f"active: woken in {took}"
        case _:
            return f"active after {took}"
