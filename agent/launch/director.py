"""Directs the engine of one slot (docs/standby.md): what its processes say comes in, orders to them go out.

It reads no clock, opens no file and talks to nobody itself: who has it gives it the time (seconds on CLOCK_MONOTONIC)
and carries out what it wants of the world. One director is for one engine; the next engine gets another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError
from weightcache.launch.orders import MAIN, Pending, Step, role
from weightcache.launch.promotion import Trial, cause
from weightcache.launch.world import Limits, Member, World, named
from weightcache.standby import messages
from weightcache.standby.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightcache.standby.messages import Answer, Done, Order, Process, Role
    from weightcache.standby.priority import Blocker
    from weightcache.standby.status import Promotion

_STAYS = (Step.CLEARING, Step.OWNING, Step.ACCEPTING, Step.ACTIVE, Step.DRAINING, Step.RELEASING, Step.YIELDING)
"""While the lock is this engine's, it should not just end: requests may run."""
_BEFORE_MEMORY = (Step.STARTING, Step.RESTING, Step.ELECTING, Step.REFUSING)
"""Nobody misses an engine that waits a little longer."""
_WANT_THE_LOCK: tuple[Role, ...] = ("standby", "promoting")
LOOK = 1.0
"""Seconds between two looks at the marker, which the other launcher may make and remove."""
CLEAR_LOOK = 0.02
"""Seconds between two looks whether others have given back their memory."""
SAY = 5.0
"""Seconds more than a rank has to own its memory: it says why it could not, worth more than that it did not."""
REST_LOOK = 0.2
"""Seconds between two looks whether the lock that was given back has an owner, or what parks this engine is gone."""


@dataclass(slots=True)
class Director:
    """Events come in as method calls, each with the time; ``step``, ``role`` and ``promotion`` say how it stands."""

    world: World
    ranks: int
    limits: Limits
    began: float
    members: dict[int, Member] = field(default_factory=dict)
    step: Step = Step.STARTING
    promotion: Promotion | None = None
    """The last one."""
    succeeds_itself: bool = False
    """Whether the engine that was elected before this one was of the same slot."""
    stopping: bool = False
    _parked: bool = False
    _woken_at: float = -math.inf
    _asked_at: float = -math.inf
    """When it began to wait for the lock."""
    _pending: Pending = field(default_factory=Pending)
    _trial: Trial | None = None
    _rest_until: float = 0.0
    _blockers: tuple[Blocker, ...] = ()
    _clear_until: float = 0.0
    """Until when they have to change."""
    _before: Roster = field(default_factory=Roster)
    """This slot's, as long as this engine is none that may have memory."""
    _fence: tuple[Process, ...] = ()
    _look_at: float = 0.0

    @property
    def role(self) -> Role:
        """What this engine is."""
        return role(self.step, self._parked, self._rest_until > 0)

    @property
    def own(self) -> tuple[Process, ...]:
        """The processes that have KV memory when this engine is active."""
        return tuple(member.process for rank, member in sorted(self.members.items()) if rank != MAIN)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def joined(self, rank: int, process: Process, now: float) -> None:
        """A process said who it is."""
        self.members[rank] = Member(process, beat=now)

    def heard(self, rank: int, answer: Answer, now: float) -> None:
        """A process that has joined said something."""
        if self.step is Step.ENDED:
            return
        member = self.members[rank]
        member.beat = now
        if isinstance(answer, messages.Ready):
            member.ready = True
            if self.step is Step.STARTING and len(self.members) > self.ranks and self._all_ready():
                self.step = Step.RESTING
                self.tick(now)
        elif isinstance(answer, messages.Done):
            self._done(rank, answer, now)
        elif not isinstance(answer, messages.Beat):
            self._end(f"{named(rank)} joined twice")

    def lost(self, rank: int, why: str) -> None:
        """A process is gone, or as good as that."""
        if self.stopping and self.step not in _STAYS:
            self.step = Step.ENDED  # as it should be: it was told to end, and takes the time that it needs
        else:
            self._end(f"{named(rank)} {why}")

    def retire(self, now: float) -> str:
        """Let the other slot be promoted. Why not, or an empty text."""
        if self.step is not Step.ACTIVE:
            return f"it is not active, but {self.role}"
        if (other := self.world.other()) != "standby":
            return f"nobody would take over: the other slot is {other}, not standby"
        self._drain(now)
        return ""

    def stop(self, now: float) -> bool:
        """The engine is to end: an active one retires first. Whether it can end now; ask again after each event."""
        self.stopping = True
        if self.step is Step.ACTIVE:
            self._drain(now)
        return self.step not in _STAYS

    def tick(self, now: float) -> None:
        """Time has passed, or the marker was made or removed."""
        if self.step is Step.ENDED:
            return
        self._look_at = now + LOOK
        self._see_marker(now)
        if late := self._pending.late(now):
            self._end(f"{named(late.rank)} did not carry out {late.name} within {late.seconds:.0f} s")
        elif now >= self._hung_at():
            self._end(self._silent(now))
        elif self.step is Step.ACTIVE and self._parked:
            self._drain(now)
        elif self.step in (Step.RESTING, Step.CLEARING):
            try:
                self._settle(now) if self.step is Step.RESTING else self._clear(now)
            except WeightcacheError as error:
                self._end(error.message)

    def due(self) -> float:
        """When ``tick`` has something to do, if nothing happens before."""
        if self.step is Step.ENDED:
            return math.inf
        return min(self._pending.due(), self._hung_at(), self._look_at)

    def healthy(self, now: float) -> bool:
        """Whether every process was heard of lately, or the engine is starting and may be silent."""
        return self.step is not Step.ENDED and now < self._hung_at()

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """With nothing under way: wait for the lock, unless somebody else is to have it."""
        if self.stopping:
            return
        if self._parked:
            self._rest_until, self._look_at = 0.0, now + REST_LOOK  # a death is seen by looking alone
        elif now < self._rest_until and not self.world.taken() and self.world.other() in _WANT_THE_LOCK:
            self._look_at = now + REST_LOOK
        else:
            self._rest_until, self._asked_at = 0.0, now
            self._order(Step.ELECTING, (MAIN,), messages.Elect, math.inf, now)

    def _done(self, rank: int, answer: Done, now: float) -> None:
        order = self._pending.answered(rank, answer.order)
        if order is None:
            self._end(f"{named(rank)} answered an order that it was not given")
        elif answer.problem:
            self._end(f"{named(rank)}: {answer.problem}")
        else:
            if self._trial is not None:
                self._trial.steps(answer.seconds)
            if not self._pending:
                self._next(now)

    def _next(self, now: float) -> None:
        """Every order of this step was carried out."""
        try:
            match self.step:
                case Step.ELECTING:
                    self._elected(now)
                case Step.OWNING:
                    self._reached("own", now)
                    self._order(Step.ACCEPTING, (MAIN,), messages.Accept, self.limits.order, now)
                case Step.ACCEPTING:
                    self._accepting(now)
                case Step.DRAINING:
                    self._order(Step.RELEASING, range(self.ranks), messages.Release, self.limits.order, now)
                case Step.RELEASING:
                    self.world.enroll(Roster((), now))
                    self._order(Step.YIELDING, (MAIN,), messages.Yield, self.limits.order, now)
                case Step.YIELDING:
                    self.step = Step.RESTING
                    self.world.tell_others()
                    if not self._parked:
                        self._rest_until, self._look_at = now + self.limits.rest, now + REST_LOOK
                case _:  # the lock was given back at once
                    self.step = Step.RESTING
                    self.world.tell_others()
                    self.tick(now)
        except WeightcacheError as error:
            self._end(error.message)

    def _elected(self, now: float) -> None:
        self._see_marker(now)  # whoever parks the engine may have told the other slot first
        if self._parked or self.stopping:
            self._order(Step.REFUSING, (MAIN,), messages.Yield, self.limits.order, now)
            return
        self._before = self._without_own(self.world.roster())
        earlier = self.world.living(self._before.processes)
        # From here on nobody can miss anyone of them, whatever dies when. Only then the other slot's: a launcher that
        # was stopped on the way has lost its lock, and reads what the next one's has written, or is read by it.
        self.world.enroll(Roster((*earlier, *self.own), now))
        other = self._without_own(self.world.other_roster())
        self.succeeds_itself = self._before.at > other.at
        last = self._before if self.succeeds_itself else other
        self._trial = Trial(now, cause(bool(last.processes), now - last.at, now - self._asked_at, now - self._woken_at))
        self._reached("roster", now)
        self.step, self._blockers = Step.CLEARING, ()
        self._fence = (*earlier, *self.world.living(other.processes))
        self.world.tell_others()  # also one that is about to take memory: it is not in the way yet
        self._clear(now)

    def _clear(self, now: float) -> None:
        """Less important engines see that the lock is taken, and park; they need no order."""
        if self._parked or self.stopping:
            self.world.enroll(self._before)
            self._order(Step.REFUSING, (MAIN,), messages.Yield, self.limits.order, now)
            return
        if others := self.world.in_the_way():
            self._look_at = now + CLEAR_LOOK
            if others != self._blockers or all(other.leaving for other in others):
                self._blockers, self._clear_until = others, now + self.limits.clear
            elif now >= self._clear_until:
                stay = ", ".join(other.engine for other in others if not other.leaving)
                self._end(f"{stay} did not give back memory within {self.limits.clear:.0f} s")
            return
        fence, seconds = self._fence, self.limits.own
        self._reached("clear", now)
        make = lambda number: messages.Own(number, fence, seconds)  # noqa: E731
        self._order(Step.OWNING, range(self.ranks), make, seconds + SAY, now)

    def _accepting(self, now: float) -> None:
        self._reached("accept", now)
        self.step = Step.ACTIVE
        if self._trial is not None:
            self.promotion, self._trial = self._trial.promotion(now), None
        self.world.enroll(Roster(self.own, now))
        self._see_marker(now)  # a more important engine may have come meanwhile, and waits
        if self._parked or self.stopping:
            self._drain(now)

    def _without_own(self, roster: Roster) -> Roster:
        return replace(roster, processes=tuple(one for one in roster.processes if one not in self.own))

    def _reached(self, phase: str, now: float) -> None:
        if self._trial is not None:
            self._trial.reached(phase, now)

    def _drain(self, now: float) -> None:
        seconds = self.limits.drain
        make = lambda number: messages.Retire(number, seconds)  # noqa: E731
        self._order(Step.DRAINING, (MAIN,), make, seconds + self.limits.margin, now)

    def _order(
        self, step: Step, ranks: Iterable[int], make: Callable[[int], Order], seconds: float, now: float
    ) -> None:
        self.step = step
        for rank in ranks:
            order = make(self._pending.number())
            self._pending.given(rank, order, seconds, now)
            if not self.world.send(rank, order):
                self._end(f"{named(rank)} takes no orders")
                return

    def _end(self, reason: str) -> None:
        if self.step is not Step.ENDED:
            self.step = Step.ENDED
            self.world.end(reason)

    # -- what it looks at ----------------------------------------------------------------------------------------------

    def _see_marker(self, now: float) -> None:
        parked = self.world.parked()
        if parked is None:  # who serves goes on, and nobody takes memory that may not be free
            parked = self._parked or self.step in _BEFORE_MEMORY
        if self._parked and not parked:
            self._woken_at = now
        self._parked = parked

    def _all_ready(self) -> bool:
        return all(member.ready for member in self.members.values())

    def _hung_at(self) -> float:
        if self.step is Step.STARTING:
            return self.began + self.limits.start
        return self.limits.hang + min(member.beat for member in self.members.values())

    def _silent(self, now: float) -> str:
        if self.step is Step.STARTING:
            return f"the engine is not ready after {now - self.began:.0f} s"
        rank = min(self.members, key=lambda rank: self.members[rank].beat)
        return f"{named(rank)} has said nothing for {now - self.members[rank].beat:.1f} s"
