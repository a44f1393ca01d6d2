"""Every transition of docs/standby.md, without processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from weightcache.errors import WeightcacheError
from weightcache.launch.director import Director
from weightcache.launch.orders import MAIN, Step
from weightcache.launch.world import Limits
from weightcache.standby.messages import (
    Accept,
    Beat,
    Done,
    Elect,
    Joined,
    Order,
    Own,
    Process,
    Ready,
    Release,
    Retire,
    Role,
    Yield,
)
from weightcache.standby.priority import Blocker
from weightcache.standby.roster import Roster

LIMITS = Limits(own=20, drain=10, hang=60, order=30, start=1800, rest=10, margin=45)
MINE = (Process(100, 1), Process(101, 1))
OTHERS = (Process(200, 1), Process(201, 1))
WITH_LOCK = (Step.OWNING, Step.ACCEPTING, Step.ACTIVE, Step.DRAINING, Step.RELEASING, Step.YIELDING)


@dataclass
class FakeWorld:
    """Remembers what was asked of it; ``orders`` are those that are not answered yet."""

    mine: Roster = field(default_factory=Roster)
    others: tuple[Process, ...] = ()
    others_at: float = 0.0
    dead: set[Process] = field(default_factory=set)
    orders: list[tuple[int, Order]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    deaf: set[int] = field(default_factory=set)
    is_taken: bool = False
    marker: bool | None = False
    rivals: tuple[str, ...] = ()
    leaving: set[str] = field(default_factory=set)
    neighbour: Role = "down"
    broken: str = ""
    ended: list[str] = field(default_factory=list)

    def send(self, rank: int, order: Order) -> bool:
        self.orders.append((rank, order))
        self.log.append(f"{type(order).__name__} {rank}")
        return rank not in self.deaf

    def roster(self) -> Roster:
        self.log.append("read")
        return self.mine

    def other_roster(self) -> Roster:
        if self.broken == "read":
            raise WeightcacheError("the roster is damaged")
        self.log.append("read other")
        return Roster(self.others, self.others_at)

    def enroll(self, roster: Roster) -> None:
        if self.broken == "write":
            raise WeightcacheError("the disk is full")
        self.mine = roster
        self.log.append("write")

    def living(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        return tuple(process for process in processes if process not in self.dead)

    def taken(self) -> bool:
        return self.is_taken

    def parked(self) -> bool | None:
        return self.marker

    def in_the_way(self) -> tuple[Blocker, ...]:
        return tuple(Blocker(engine, engine in self.leaving) for engine in self.rivals)

    def tell_others(self) -> None:
        self.log.append("tell")

    def other(self) -> Role:
        return self.neighbour

    def end(self, reason: str) -> None:
        self.ended.append(reason)


class Play:
    """A director of an engine with two ranks, its world and the clock."""

    def __init__(self, **world: object) -> None:
        self.now = 1000.0
        self.world = FakeWorld(**world)  # type: ignore[arg-type]
        self.director = Director(self.world, 2, LIMITS, self.now)

    def join(self, *ranks: int) -> None:
        for rank in ranks or (MAIN, 0, 1):
            self.director.joined(rank, Process(99, 1) if rank == MAIN else MINE[rank], self.now)

    def ready(self, *ranks: int) -> None:
        for rank in ranks or (MAIN, 0, 1):
            self.director.heard(rank, Ready(), self.now)

    def pending(self) -> list[str]:
        return [f"{type(order).__name__} {rank}" for rank, order in self.world.orders]

    def answer(self, problem: str = "", **seconds: float) -> None:
        """Every order that was not answered is."""
        orders, self.world.orders = self.world.orders, []
        for rank, order in orders:
            self.director.heard(rank, Done(order.order, problem, seconds), self.now)

    def wait(self, seconds: float, beats: bool = True) -> None:
        self.now += seconds
        for rank in (MAIN, 0, 1):
            if beats and rank in self.director.members:
                self.director.heard(rank, Beat(), self.now)
        self.director.tick(self.now)

    def to(self, step: Step) -> None:
        """Go on until there, with everything as it should be."""
        self.world.rivals = ("low",) if step is Step.CLEARING else ()
        self.join()
        self.ready()
        for _ in range(10):
            if self.director.step is step:
                return
            if self.director.step is Step.ACTIVE:
                self.world.neighbour = "standby"
                assert self.director.retire(self.now) == ""
            else:
                self.answer()
        raise AssertionError(f"{step} was not reached")

    @property
    def role(self) -> Role:
        return self.director.role


def test_a_start_in_all_its_steps() -> None:
    play = Play()
    play.join(MAIN)
    play.ready(MAIN)
    play.join(0, 1)
    play.ready(0)
    assert (play.role, play.pending()) == ("starting", [])
    play.ready(1)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])
    play.answer()
    assert (play.role, play.pending()) == ("promoting", ["Own 0", "Own 1"])
    assert play.world.mine.processes == MINE
    play.now += 0.5
    play.answer(lock=0.1, fence=0.2, map=0.1)
    assert (play.role, play.pending()) == ("promoting", ["Accept -1"])
    play.now += 0.25
    play.answer()
    assert (play.role, play.pending()) == ("active", [])
    assert play.world.log == ["Elect -1", "read", "write", "read other", "tell", "Own 0", "Own 1", "Accept -1", "write"]
    promotion = play.director.promotion
    assert promotion is not None
    assert (promotion.cause, promotion.seconds) == ("start", 0.75)
    steps = {"lock": 0.1, "fence": 0.2, "map": 0.1}
    assert promotion.phases == {"roster": 0, "clear": 0, "own": 0.5, "accept": 0.25, **steps}


def test_less_important_engines_give_back_their_memory_first() -> None:
    play = Play(others=OTHERS, rivals=("low", "lower"))
    play.join()
    play.ready()
    play.answer()
    assert (play.role, play.pending(), play.world.log[-1]) == ("promoting", [], "tell")
    assert play.director.due() <= play.now + 0.1
    play.wait(3)
    play.world.rivals = ("lower",)
    play.wait(1)
    assert play.pending() == []
    play.world.rivals = ()
    play.wait(0.5)
    assert play.pending() == ["Own 0", "Own 1"]
    assert fences(play) == {OTHERS}
    play.answer()
    play.answer()
    assert play.director.promotion is not None
    assert play.director.promotion.phases["clear"] == 4.5


def test_an_engine_in_whose_way_others_stay_ends() -> None:
    play = Play()
    play.to(Step.CLEARING)
    play.wait(LIMITS.clear - 1)
    assert not play.world.ended
    play.wait(1)
    assert play.world.ended == ["low did not give back memory within 180 s"]


def test_who_retires_is_waited_for_as_long_as_that_takes() -> None:
    play = Play()
    play.to(Step.CLEARING)
    play.wait(LIMITS.clear - 1)
    play.world.leaving = {"low"}
    for _ in range(100):
        play.wait(50)
    play.world.rivals = ("low", "lower")
    play.wait(50)
    play.wait(LIMITS.clear - 1)
    assert (play.world.ended, play.role) == ([], "promoting")
    play.wait(1)
    assert play.world.ended == ["lower did not give back memory within 180 s"]


def test_the_limit_begins_again_with_each_change() -> None:
    play = Play()
    play.to(Step.CLEARING)
    play.world.rivals = ("low", "lower")
    for rivals in (("low", "lower"), ("lower",)):
        play.wait(LIMITS.clear - 1)
        play.world.rivals = rivals
    play.wait(LIMITS.clear - 1)
    assert not play.world.ended
    play.wait(LIMITS.clear)
    assert play.world.ended == ["lower did not give back memory within 180 s"]


@pytest.mark.parametrize("stop", [True, False])
def test_while_others_give_back_memory_an_engine_may_be_parked_itself(stop: bool) -> None:
    before = Roster((Process(102, 1),), 500.0)
    play = Play(mine=before)
    play.to(Step.CLEARING)
    assert play.world.mine == Roster((Process(102, 1), *MINE), play.now)
    if stop:
        assert not play.director.stop(play.now)
    play.world.marker = not stop
    play.wait(0.1)
    assert play.pending() == ["Yield -1"]
    assert play.world.mine == before
    play.answer()
    assert play.director.role == ("standby" if stop else "parked")
    assert not play.world.ended


def test_a_more_important_engine_that_came_during_a_promotion_is_seen_at_its_end() -> None:
    play = Play()
    play.to(Step.ACCEPTING)
    play.world.marker = True
    play.answer()
    assert play.pending() == ["Retire -1"]


@pytest.mark.parametrize("step", [Step.CLEARING, *WITH_LOCK])
def test_who_cannot_see_more_important_engines_goes_on_with_what_it_has(step: Step) -> None:
    play = Play()
    play.to(step)
    play.world.marker = None
    play.wait(0.1)
    assert (play.director.step, play.world.ended) == (step, [])
    if step is Step.ACCEPTING:
        play.answer()
        assert play.role == "active"
    assert "Retire -1" not in play.pending() or step is Step.DRAINING


def test_who_cannot_see_more_important_engines_is_not_promoted_before_it_can() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.world.marker = None
    play.answer()
    assert play.pending() == ["Yield -1"]
    play.answer()
    play.wait(LIMITS.rest + 1)
    assert (play.role, play.pending(), play.world.ended) == ("parked", [], [])
    assert "read" not in play.world.log
    play.world.marker = False
    play.wait(1.0)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])
    play.answer()
    assert play.pending() == ["Own 0", "Own 1"]


def test_others_hear_of_it_when_the_lock_was_given_back() -> None:
    play = Play()
    play.to(Step.YIELDING)
    play.world.log.clear()
    play.answer()
    assert "tell" in play.world.log


def test_others_hear_of_it_when_the_lock_was_given_back_unused() -> None:
    """They have seen that it was taken, and have given back their memory for it."""
    play = Play()
    play.to(Step.CLEARING)
    play.world.marker = True
    play.wait(1.0)
    assert play.pending() == ["Yield -1"]
    play.world.log.clear()
    play.answer()
    assert play.role == "parked"
    assert "tell" in play.world.log


def test_a_roster_holds_everybody_of_its_slot_until_the_fence_is_complete() -> None:
    earlier = (Process(102, 1), Process(103, 1))
    play = Play(mine=Roster(earlier, 10.0), others=OTHERS, others_at=20.0)
    play.to(Step.OWNING)
    assert fences(play) == {(*earlier, *OTHERS)}
    assert play.world.mine == Roster((*earlier, *MINE), 1000.0)
    rank, order = play.world.orders.pop(0)
    play.director.heard(rank, Done(order.order), play.now)
    assert play.pending() == ["Own 1"]
    assert play.world.mine.processes == (*earlier, *MINE)
    play.answer()
    assert play.pending() == ["Accept -1"]
    play.answer()
    assert play.world.mine == Roster(MINE, play.now)
    assert play.world.others == OTHERS
    assert play.director.promotion is not None
    assert play.director.promotion.cause == "death"
    assert not play.director.succeeds_itself


def test_the_other_slots_roster_is_read_when_the_own_one_is_written() -> None:
    """Of two launchers that take each other's lock for their own, one at least sees the other's ranks."""
    play = Play()
    play.to(Step.ELECTING)
    write = play.world.enroll

    def written(roster: Roster) -> None:
        write(roster)
        play.world.others = OTHERS  # just now

    play.world.enroll = written  # type: ignore[method-assign]
    play.answer()
    assert fences(play) == {OTHERS}


def test_who_has_ended_is_in_no_roster_and_no_fence() -> None:
    """Or each failed promotion would leave some, until the order is too large."""
    earlier = (Process(102, 1), Process(103, 1))
    play = Play(mine=Roster(earlier, 20.0), others=OTHERS, dead={earlier[0], OTHERS[1]})
    play.to(Step.OWNING)
    assert fences(play) == {(earlier[1], OTHERS[0])}
    assert play.world.mine.processes == (earlier[1], *MINE)
    play.to(Step.ACTIVE)
    assert play.director.succeeds_itself


def fences(play: Play) -> set[tuple[Process, ...]]:
    return {order.fence for _, order in play.world.orders if isinstance(order, Own)}


def test_ranks_are_told_how_long_owning_may_take() -> None:
    play = Play()
    play.to(Step.OWNING)
    assert [order.seconds for _, order in play.world.orders if isinstance(order, Own)] == [LIMITS.own] * 2


def test_nobody_waits_for_himself() -> None:
    play = Play(mine=Roster(MINE, 5.0), others=(*MINE, OTHERS[0]))
    play.to(Step.OWNING)
    assert fences(play) == {OTHERS[:1]}


def test_the_slowest_rank_is_what_a_step_took() -> None:
    play = Play()
    play.to(Step.OWNING)
    for took in (0.3, 0.1):
        rank, order = play.world.orders.pop(0)
        play.director.heard(rank, Done(order.order, seconds={"map": took, "own": 9.0, "lock": -1.0}), play.now)
    play.answer()
    assert play.director.promotion is not None
    assert play.director.promotion.phases["map"] == 0.3
    assert play.director.promotion.phases["own"] == 0.0
    assert "lock" not in play.director.promotion.phases


@pytest.mark.parametrize(
    ("at", "others", "dead", "cause"),
    [
        (0.0, (), set(), "start"),  # no roster: none was ever active
        (950.0, (), set(), "start"),  # who retired did so before this one stood by
        (1009.0, (), set(), "promote"),
        (1009.0, OTHERS, set(), "death"),
        (950.0, OTHERS, set(OTHERS), "death"),
    ],
)
def test_why(at: float, others: tuple[Process, ...], dead: set[Process], cause: str) -> None:
    play = Play(others=others, others_at=at, dead=dead)
    play.to(Step.ELECTING)
    play.now += 10
    play.to(Step.ACTIVE)
    assert play.director.promotion is not None
    assert play.director.promotion.cause == cause


def test_the_roster_that_was_written_last_says_why() -> None:
    """The other slot's engine has retired since this slot's last one died."""
    play = Play(mine=Roster((Process(102, 1),), 900.0), others_at=1005.0, dead={Process(102, 1)})
    play.to(Step.ELECTING)
    play.now += 10
    play.to(Step.ACTIVE)
    assert play.director.promotion is not None
    assert play.director.promotion.cause == "promote"


def test_who_was_woken_once_and_lost_is_promoted_later() -> None:
    play = Play(marker=True)
    play.to(Step.RESTING)
    play.world.marker = False
    play.wait(0)
    play.now += 100
    play.world.others_at = play.now - 5  # the one that was elected instead has retired
    play.to(Step.ACTIVE)
    assert play.director.promotion is not None
    assert play.director.promotion.cause == "promote"


def test_retiring_in_all_its_steps() -> None:
    play = Play()
    play.to(Step.ACTIVE)
    play.world.neighbour = "standby"
    play.world.log.clear()
    assert play.director.retire(play.now) == ""
    assert (play.role, play.world.orders[0][1]) == ("retiring", Retire(5, LIMITS.drain))
    play.wait(LIMITS.drain + 1)
    play.answer()
    assert (play.role, play.pending()) == ("retiring", ["Release 0", "Release 1"])
    assert play.world.mine.processes == MINE
    play.answer()
    # Nothing of this engine has KV memory: whoever is elected now need not wait for it.
    assert (play.world.mine.processes, play.pending()) == ((), ["Yield -1"])
    assert play.world.log == ["Retire -1", "Release 0", "Release 1", "write", "Yield -1"]
    play.world.is_taken = True
    play.answer()
    assert (play.role, play.pending()) == ("retiring", [])
    assert play.director.due() <= play.now + 0.2
    play.wait(0.2)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])
    play.answer()
    assert play.role == "promoting"


def test_who_has_retired_leaves_the_lock_to_others_for_a_while() -> None:
    play = Play()
    play.to(Step.YIELDING)
    play.answer()
    for _ in range(40):
        play.wait(0.2)
        assert (play.role, play.pending()) == ("retiring", [])
    play.wait(LIMITS.rest)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])


@pytest.mark.parametrize("other", ["starting", "down"])
def test_who_has_retired_takes_the_lock_back_when_nobody_is_left_who_would(other: Role) -> None:
    play = Play()
    play.to(Step.YIELDING)
    play.answer()
    play.wait(0.2)
    assert (play.role, play.pending()) == ("retiring", [])
    play.world.neighbour = other
    play.wait(0.2)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])


@pytest.mark.parametrize("other", ["starting", "down", "parked", "promoting"])
def test_nobody_retires_without_a_standby(other: Role) -> None:
    play = Play()
    play.to(Step.ACTIVE)
    play.world.neighbour = other
    assert other in play.director.retire(play.now)
    assert (play.role, play.pending()) == ("active", [])


@pytest.mark.parametrize("step", [step for step in Step if step is not Step.ACTIVE])
def test_only_an_active_one_retires(step: Step) -> None:
    play = Play(neighbour="standby")
    play.director.step = step
    assert play.director.retire(play.now).startswith("it is not active, but ")
    assert play.pending() == []


def test_parked_from_its_start() -> None:
    play = Play(marker=True)
    play.join()
    play.ready()
    assert (play.role, play.pending()) == ("parked", [])
    play.wait(3600)
    assert (play.role, play.pending()) == ("parked", [])
    play.world.marker = False
    play.wait(0)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])
    play.answer()
    play.answer()
    play.answer()
    assert play.director.promotion is not None
    assert play.director.promotion.cause == "wake"


def test_parked_while_it_stands_by() -> None:
    """Nobody can give up waiting for the lock: it is given back at once."""
    play = Play()
    play.to(Step.ELECTING)
    play.world.marker = True
    play.answer()
    assert (play.role, play.pending()) == ("parked", ["Yield -1"])
    assert play.world.mine.processes == ()
    play.answer()
    play.wait(1)
    assert (play.role, play.pending()) == ("parked", [])


def test_woken_while_it_stands_by() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.world.marker = True
    play.wait(0)
    assert (play.role, play.pending()) == ("parked", ["Elect -1"])
    play.world.marker = False
    play.wait(0)
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])
    play.answer()
    assert play.role == "promoting"


def test_woken_while_it_gives_the_lock_back() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.world.marker = True
    play.answer()
    play.world.marker = False
    play.answer()
    assert (play.role, play.pending()) == ("standby", ["Elect -1"])


@pytest.mark.parametrize(
    "step", [Step.OWNING, Step.ACCEPTING, Step.ACTIVE, Step.DRAINING, Step.RELEASING, Step.YIELDING]
)
def test_parked_while_it_has_the_lock(step: Step) -> None:
    play = Play()
    play.to(step)
    play.world.marker = True
    play.wait(0)
    for _ in range(8):
        play.answer()
    assert (play.role, play.pending(), play.world.mine.processes) == ("parked", [], ())
    assert not play.world.ended


@pytest.mark.parametrize(
    "step", [step for step in Step if step not in (Step.STARTING, Step.ENDED, Step.REFUSING, Step.RESTING)]
)
@pytest.mark.parametrize("rank", [MAIN, 0, 1])
def test_a_death_at_any_step_ends_the_engine(step: Step, rank: int) -> None:
    play = Play()
    play.to(step)
    roster = play.world.mine.processes
    play.director.lost(rank, "has ended")
    name = "the main process" if rank == MAIN else f"rank {rank}"
    assert play.world.ended == [f"{name} has ended"]
    play.answer()
    play.director.lost(1 - max(rank, 0), "has ended")
    play.wait(5000)
    assert len(play.world.ended) == 1
    assert play.world.mine.processes == roster
    assert play.director.due() == float("inf")
    assert not play.director.healthy(play.now)


def test_a_death_while_it_starts_ends_the_engine() -> None:
    play = Play()
    play.join(0)
    play.director.lost(0, "has ended")
    assert play.world.ended == ["rank 0 has ended"]


@pytest.mark.parametrize(
    "step", [Step.ELECTING, Step.OWNING, Step.ACCEPTING, Step.DRAINING, Step.RELEASING, Step.YIELDING]
)
def test_an_order_that_cannot_be_carried_out_ends_the_engine(step: Step) -> None:
    play = Play()
    play.to(step)
    play.answer("it does not work")
    assert len(play.world.ended) == 1
    assert play.world.ended[0].endswith(": it does not work")


@pytest.mark.parametrize(
    ("step", "seconds", "name"),
    [
        (Step.OWNING, LIMITS.own + 5, "Own"),
        (Step.ACCEPTING, LIMITS.order, "Accept"),
        (Step.DRAINING, LIMITS.drain + LIMITS.margin, "Retire"),
        (Step.RELEASING, LIMITS.order, "Release"),
        (Step.YIELDING, LIMITS.order, "Yield"),
    ],
)
def test_an_order_has_a_deadline(step: Step, seconds: float, name: str) -> None:
    play = Play()
    play.to(step)
    play.wait(seconds - 0.5)
    assert not play.world.ended
    assert play.director.due() <= play.now + 0.5
    play.wait(0.5)
    assert play.world.ended[0].endswith(f"did not carry out {name} within {seconds:.0f} s")


def test_waiting_for_the_lock_has_none() -> None:
    play = Play()
    play.to(Step.ELECTING)
    for _ in range(100):
        play.wait(50)
    assert (play.world.ended, play.role) == ([], "standby")


@pytest.mark.parametrize(
    "step", [Step.STARTING, Step.ELECTING, Step.OWNING, Step.ACTIVE, Step.DRAINING, Step.RELEASING]
)
def test_a_process_that_takes_no_order_ends_the_engine(step: Step) -> None:
    play = Play(neighbour="standby")
    if step is Step.STARTING:
        play.join()
    else:
        play.to(step)
    play.world.deaf = {MAIN, 0, 1}
    if step is Step.STARTING:
        play.ready()
    elif step is Step.ACTIVE:
        play.director.retire(play.now)
    else:
        play.answer()
    assert len(play.world.ended) == 1
    assert play.world.ended[0].endswith("takes no orders")


def test_an_answer_to_no_order_ends_the_engine() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.director.heard(MAIN, Done(77), play.now)
    assert play.world.ended == ["the main process answered an order that it was not given"]


def test_an_answer_to_another_ones_order_ends_the_engine() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.director.heard(0, Done(play.world.orders[0][1].order), play.now)
    assert play.world.ended == ["rank 0 answered an order that it was not given"]


def test_joining_twice_ends_the_engine() -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.director.heard(0, Joined(0), play.now)
    assert play.world.ended == ["rank 0 joined twice"]


@pytest.mark.parametrize(("broken", "reason"), [("read", "the roster is damaged"), ("write", "the disk is full")])
def test_without_a_roster_nobody_is_promoted(broken: str, reason: str) -> None:
    play = Play()
    play.to(Step.ELECTING)
    play.world.broken = broken
    play.answer()
    assert (play.world.ended, play.pending()) == ([reason], [])


@pytest.mark.parametrize(("hung", "who"), [(1, "rank 1"), (MAIN, "the main process")])
def test_hung_is_a_process_that_was_not_heard_of_for_too_long(hung: int, who: str) -> None:
    play = Play()
    play.to(Step.ACTIVE)
    play.wait(30)
    play.now += LIMITS.hang - 1
    for rank in {MAIN, 0, 1} - {hung}:
        play.director.heard(rank, Beat(), play.now)
    assert play.director.healthy(play.now)
    assert play.director.due() <= play.now + 1
    play.wait(1, beats=False)
    assert not play.director.healthy(play.now)
    assert play.world.ended == [f"{who} has said nothing for 60.0 s"]


def test_an_engine_that_starts_may_be_silent_but_not_for_ever() -> None:
    play = Play()
    play.join(0)
    play.wait(LIMITS.start - 1, beats=False)
    assert play.director.healthy(play.now)
    assert not play.world.ended
    play.wait(1, beats=False)
    assert not play.director.healthy(play.now)
    assert play.world.ended == ["the engine is not ready after 1800 s"]


@pytest.mark.parametrize("step", [Step.STARTING, Step.ELECTING])
def test_who_is_not_active_may_end_at_once_and_in_peace(step: Step) -> None:
    play = Play()
    if step is Step.STARTING:
        play.join()
    else:
        play.to(step)
    assert play.director.stop(play.now)
    play.director.lost(0, "has closed its connection")
    play.wait(5000, beats=False)
    assert not play.world.ended


@pytest.mark.parametrize("step", [Step.OWNING, Step.ACCEPTING, Step.ACTIVE, Step.DRAINING])
def test_who_has_the_lock_gives_it_back_before_it_ends(step: Step) -> None:
    play = Play()
    play.to(step)
    assert not play.director.stop(play.now)
    for _ in range(8):
        assert play.role in ("promoting", "active", "retiring")
        play.answer()
    assert play.director.stop(play.now)
    assert play.world.mine.processes == ()
    play.world.is_taken = True
    play.wait(LIMITS.rest + 1)
    assert play.pending() == []


def test_who_is_to_end_is_not_elected_any_more() -> None:
    play = Play()
    play.to(Step.ELECTING)
    assert play.director.stop(play.now)
    play.answer()
    assert play.pending() == ["Yield -1"]


def test_who_is_to_end_and_dies_before_it_gave_the_lock_back_is_no_good_end() -> None:
    play = Play()
    play.to(Step.ACTIVE)
    assert not play.director.stop(play.now)
    play.director.lost(1, "has ended")
    assert play.world.ended == ["rank 1 has ended"]


def test_the_marker_is_looked_for_once_a_second() -> None:
    play = Play()
    play.to(Step.ACTIVE)
    play.wait(0)
    assert play.director.due() <= play.now + 1
    play.world.marker = True
    play.wait(1)
    assert (play.role, play.pending()) == ("retiring", ["Retire -1"])


def test_orders_have_numbers_of_their_own() -> None:
    play = Play()
    numbers = []
    for step in (Step.ELECTING, Step.OWNING, Step.ACCEPTING, Step.DRAINING, Step.RELEASING, Step.YIELDING):
        play.to(step)
        numbers += [order.order for _, order in play.world.orders]
        assert all(isinstance(order, Elect | Own | Accept | Retire | Release | Yield) for _, order in play.world.orders)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 8
