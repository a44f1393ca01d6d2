"""The world as it is for one engine of a slot: its processes, the files of both slots, and what ends it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from weightcache.errors import NoRoom, WeightcacheError
from weightcache.launch.console import say
from weightcache.standby import control, fence, locks, roster, status
from weightcache.standby.messages import Accept
from weightcache.standby.priority import Blocker

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable
    from pathlib import Path

    from weightcache.launch.channel import Channel
    from weightcache.standby.messages import Order, Process, Role
    from weightcache.standby.places import EnginePaths, SlotName
    from weightcache.standby.priority import Claim
    from weightcache.standby.roster import Roster

TELL_SECONDS = 5.0
UNSEEN = Blocker("engines that cannot be seen", leaving=False)
"""Whoever may be in the way, when this process cannot look."""


class SlotWorld:
    """See weightcache.launch.world.World. ``listener`` stays the caller's; ``ended`` says why the engine is to end."""

    def __init__(
        self, name: SlotName, paths: EnginePaths, channel: Channel, listener: socket.socket, claim: Claim
    ) -> None:
        self._name = name
        self._claim = claim
        self._waited_for: tuple[str, ...] = ()
        self._rival = ""
        """The more important engine that was seen last."""
        self.blind = ""
        """Why it cannot be told whether there is one, in a sentence; empty while it can."""
        self._paths = paths
        self._channel = channel
        self._listener = listener
        self.ended: str | None = None

    def send(self, rank: int, order: Order) -> bool:
        """Give an order; the listening socket goes with Accept."""
        return self._channel.send(rank, order, [self._listener.fileno()] if isinstance(order, Accept) else [])

    def roster(self) -> Roster:
        """This slot's."""
        return roster.read(self._paths.roster(self._name.slot))

    def other_roster(self) -> Roster:
        """The other slot's."""
        return roster.read(self._paths.roster(self._name.other.slot))

    def enroll(self, roster_: Roster) -> None:
        """Write this slot's."""
        roster.write(self._paths.roster(self._name.slot), roster_)

    def living(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        """Who is not seen to have ended."""
        return fence.living(processes)

    def taken(self) -> bool:
        """Whether anybody accepts, or is about to. Who cannot look waits, as for somebody who has not come yet."""
        try:
            return locks.is_taken(self._paths.lock, 0)
        except NoRoom:
            return False

    def parked(self) -> bool | None:
        """Whether the marker is there, or a more important engine; None if that cannot be told, which is said once."""
        try:
            self._rival, self.blind = self._claim.more_important(), ""
        except NoRoom as error:
            blind = f"nobody can tell whether a more important engine is there: {error.message}"
            if not self.blind:
                say(f"slot {self._name}: {blind}")
            self.blind = blind
        if os.path.lexists(self._paths.parked):
            return True
        return None if self.blind else bool(self._rival)

    def outranked(self) -> str:
        """Because of whom this engine is parked, or why that cannot be told; empty where the marker alone parks it."""
        if self.blind:
            return self.blind
        return f"{self._rival} is more important, and has the same GPU" if self._rival else ""

    def in_the_way(self) -> tuple[Blocker, ...]:
        """Whoever is less important, and has not parked yet. Says whom this engine waits for, when that is new."""
        try:
            found = self._claim.in_the_way()
        except NoRoom:
            found = (UNSEEN,)
        names = tuple(other.engine for other in found)
        if names and names != self._waited_for:
            say(f"slot {self._name}: waiting for the GPU memory of {', '.join(names)}")
        self._waited_for = names
        return found

    def tell_others(self) -> None:
        """By a thread of its own: launchers answer when they can, and would look by themselves a little later."""
        with contextlib.suppress(NoRoom):
            for path in self._claim.less_important():
                threading.Thread(target=_have_look, args=(path,), daemon=True).start()

    def other(self) -> Role:
        """What the other slot says of itself."""
        return other(self._paths, self._name.other)

    def end(self, reason: str) -> None:
        """Kill who has joined now; who holds this sees to the rest."""
        self.ended = reason
        self._channel.kill()


def _have_look(path: Path) -> None:
    with contextlib.suppress(WeightcacheError, OSError):
        control.ask(path, control.Command("report"), TELL_SECONDS)


def other(paths: EnginePaths, name: SlotName) -> Role:
    """What the launcher of a slot says of its engine; down without one."""
    found, _ = status.read(paths.status(name.slot))
    return found.role if found is not None else "down"
