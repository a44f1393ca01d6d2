"""Two ranks of one deployment: one start loads both, and what kills one agent loses neither rank's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.test_loader import fingerprint
from tests.systemd.machine import Machine
from tests.systemd.rank import ONE_SET, TARGET, Rank, configuration, eventually, open_gates, reset
from weightcache.errors import WeightcacheError
from weightcache.protocol import Load, Loaded

TOGETHER = configuration(more="[deployment]\ntp_size = 2\n")
NUMBERS = (0, 1)


@pytest.fixture
def ranks(agents: Machine, trusting: None) -> Iterator[tuple[Rank, Rank]]:
    """Both ranks, stopped, with nothing remembered of earlier tests."""
    reset(agents, TOGETHER, NUMBERS)
    yield Rank(agents, 0), Rank(agents, 1)
    open_gates(agents)
    reset(agents, configuration(), NUMBERS)


def holds(rank: Rank) -> bool:
    """Whether its agent is there, ready, and its set safe."""
    with contextlib.suppress(WeightcacheError):
        return rank.status().state == "ready" and rank.stored == ONE_SET
    return False


def resident(ranks: tuple[Rank, Rank]) -> str:
    """Wait until both hold the same load, in the store too; its group."""
    for rank in ranks:
        eventually(partial(holds, rank), rank.show)
        rank.await_active()
    groups = {held.group for rank in ranks for held in rank.status().sets}
    assert len(groups) == 1, groups
    return groups.pop()


def launches(ranks: tuple[Rank, Rank]) -> int:
    """How many loaders were started since the marks."""
    return sum(rank.text().count("test loader starts") for rank in ranks)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_start_of_one_loads_both(ranks: tuple[Rank, Rank], number: int) -> None:
    assert len(ranks[number].ready().sets) == 1  # `systemctl start` returns when this rank's weights are resident
    assert resident(ranks)
    assert launches(ranks) == 1


def test_both_at_once_are_one_launch(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].machine.systemctl("start", *(rank.service for rank in ranks))
    assert resident(ranks)
    assert launches(ranks) == 1


def test_the_target_starts_what_is_enabled_for_warm_up(ranks: tuple[Rank, Rank]) -> None:
    machine = ranks[0].machine
    machine.systemctl("enable", "weightcache@1.socket", *(f"weightcache-warm@{number}.service" for number in NUMBERS))
    try:
        machine.systemctl("stop", TARGET)
        machine.systemctl("start", TARGET)
        assert resident(ranks)
        assert launches(ranks) == 1
    finally:
        machine.systemctl("disable", *(f"weightcache-warm@{number}.service" for number in NUMBERS))


def test_killed_agents_find_their_group_again(ranks: tuple[Rank, Rank]) -> None:
    ranks[1].ready()
    group = resident(ranks)
    for rank in ranks:
        rank.mark()
    pids = [rank.kill() for rank in ranks]
    for rank, pid in zip(ranks, pids, strict=True):
        rank.successor(pid)
    assert resident(ranks) == group
    ranks[0].killed()
    assert resident(ranks) == group
    assert launches(ranks) == 0


@pytest.mark.parametrize("killed", NUMBERS)
def test_an_agent_killed_in_the_middle_of_the_launch(ranks: tuple[Rank, Rank], killed: int) -> None:
    """Its successor asks for the launch again, for both."""
    ranks[0].gate("loading-1")
    ranks[1].begin()
    ranks[0].reached("loading-1")
    ranks[killed].kill()
    ranks[0].reached("loading-1")
    ranks[0].open_all()
    assert resident(ranks)
    assert launches(ranks) == 2


def test_a_rank_that_was_stopped_gets_its_weights_back(ranks: tuple[Rank, Rank]) -> None:
    """The other one, whose agent was restarted since the load, goes on with what it holds, and so does its engine."""
    ranks[1].ready()
    group = resident(ranks)
    ranks[0].killed()
    (before,) = ranks[0].status().sets
    ranks[0].machine.systemctl("stop", ranks[1].service)
    with ranks[0].attach(fingerprint(), wait=0.0) as engine:
        with ranks[1].public() as asking:
            asking.request(Load(20.0), Loaded, 30.0)
        (held,) = ranks[0].status().sets
        assert held.id == before.id
        assert [lease.lease for lease in held.leases] == [engine.message.lease]
        assert resident(ranks) == group
