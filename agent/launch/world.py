"""What a slot's director works with: the world as it wants it, its limits, and the processes it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightcache.launch.orders import MAIN
from weightcache.standby.messages import Process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightcache.standby.messages import Order, Role
    from weightcache.standby.priority import Blocker
    from weightcache.standby.roster import Roster


START_SECONDS = 1800.0
"""What a start takes at most, besides waiting for a load."""


class World(Protocol):
    """What a director wants of the world. Whatever raises a WeightcacheError ends the engine."""

    def send(self, rank: int, order: Order) -> bool:
        """Give an order; False if the process takes none (any more). Accept gets the listening socket."""

    def roster(self) -> Roster:
        """Who of this slot may still write KV memory. Raises WeightcacheError."""

    def other_roster(self) -> Roster:
        """Who of the other slot may. Raises WeightcacheError."""

    def enroll(self, roster: Roster) -> None:
        """Write this slot's roster. Raises WeightcacheError."""

    def living(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        """Those that have not ended, as far as that can be told."""

    def taken(self) -> bool:
        """Whether anybody has the lock's byte 0."""

    def parked(self) -> bool | None:
        """Whether the marker of a parked engine is there, or a more important engine has the GPU; None: unknown now."""

    def in_the_way(self) -> tuple[Blocker, ...]:
        """Less important engines that have memory of the same GPU, or could take it."""

    def tell_others(self) -> None:
        """Have less important engines on the same GPU look now, instead of in a second."""

    def other(self) -> Role:
        """What the other slot's engine is."""

    def end(self, reason: str) -> None:
        """Kill the engine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``own``, ``drain``, ``hang``: see docs/standby.md. ``order``: for any order without a limit of its own.

    ``start``: until an engine that is not ready counts as hung. ``rest``: how long one that has retired leaves the
    lock to a standby. ``margin``: how much longer than ``drain`` retiring may take. ``reserve_bytes``: GPU memory that
    the active engine leaves to a standby. ``kv_bytes``: KV memory on each GPU, 0 if that is measured. ``unproven``: as
    in the engine's file, whose digest is ``engine``. ``clear``: how long less important engines may neither say that
    they retire nor give theirs back.
    """

    own: float
    drain: float
    hang: float
    order: float = 30.0
    start: float = START_SECONDS
    rest: float = 10.0
    margin: float = 45.0
    reserve_bytes: int = 0
    kv_bytes: int = 0
    unproven: bool = False
    engine: str = ""
    clear: float = 180.0


@dataclass(slots=True)
class Member:
    """A process of the engine. ``beat``: when it was heard of last."""

    process: Process
    ready: bool = False
    beat: float = 0.0


def named(rank: int) -> str:
    """A process of the engine, in a sentence."""
    return "the main process" if rank == MAIN else f"rank {rank}"
