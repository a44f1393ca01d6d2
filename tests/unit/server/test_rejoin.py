"""A rank that lost its weights gets the same ones back, and those that hold theirs go on with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from tests.support import test_loader
from tests.unit.server.harness import SECONDS, contents, donation, eventually
from tests.unit.server.ranks import RANKS, Ranks, failure, load_again, one_group
from weightcache import protocol
from weightcache.content import content_of
from weightcache.errors import InUse, ProtocolError, WeightcacheError
from weightcache.manifest import encode
from weightcache.protocol import SetInfo

Held = list[tuple[str, str]]


def held(ranks: Ranks) -> list[Held]:
    """The sets of each rank, and the loads that they belong to."""
    return [[(resident.id, resident.group) for resident in agent.status().sets] for agent in ranks.agents]


def lose(ranks: Ranks, lost: Sequence[int], *arguments: str) -> None:
    """Restart agents without anything that keeps their weights."""
    for rank in lost:
        ranks.agents[rank].stop()
        ranks.agents[rank].start(*arguments)


def loaded(ranks: Ranks) -> str:
    """Have all ranks load for the first time; the group."""
    ranks.start()
    ranks.load(0).result(SECONDS)
    return one_group(ranks)


def disk_loads(ranks: Ranks) -> list[str]:
    """Which ranks' processes of loaders have loaded, and how."""
    text = "".join(agent.text() for agent in ranks.agents)
    return [line.partition("loader: ")[2] for line in text.splitlines() if " loads, " in line]


ALL = [f"rank {rank} loads, with all" for rank in range(RANKS)]


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_was_lost_is_loaded(ranks: Ranks, lost: tuple[int, ...]) -> None:
    group = loaded(ranks)
    before = held(ranks)
    lose(ranks, lost)
    ranks.load(lost[-1]).result(SECONDS)
    assert one_group(ranks) == group
    after = held(ranks)
    assert [after[rank] == before[rank] for rank in range(RANKS)] == [rank not in lost for rank in range(RANKS)]
    assert sorted(disk_loads(ranks)) == sorted([*ALL, *(f"rank {rank} loads, alone" for rank in lost)])
    for rank, agent in enumerate(ranks.agents):
        assert agent.await_state("ready").measured.loads == (
            {"loader:published": 1} if rank in lost else {"loader:published": 1, "loader:retained": 1}
        )
        with agent.attach(wait=0.0) as engine:
            assert contents(engine) == [
                test_loader.arena_bytes(0, n, size) for n, size in enumerate(test_loader.ARENAS)
            ]


def test_it_can_be_lost_again_and_again(ranks: Ranks) -> None:
    """Also by a rank that holds what it got back itself."""
    group = loaded(ranks)
    for lost in (0, 1, 0):
        lose(ranks, [lost], "--load")
        ranks.agents[lost].await_state("ready")
        assert one_group(ranks) == group
    assert sum(line.endswith("alone") for line in disk_loads(ranks)) == 3


def test_engines_of_the_others_are_not_disturbed(ranks: Ranks) -> None:
    group = loaded(ranks)
    before = held(ranks)
    ranks.agents[0].gate("waiting-0")
    with ranks.agents[0].attach(wait=0.0) as engine:
        lose(ranks, [2], "--load")
        ranks.agents[0].reached("waiting-0")
        with ranks.agents[0].attach(wait=0.0) as another:  # also while the launch goes on
            assert isinstance(another.message, protocol.Attached)
            ranks.agents[0].open("waiting-0")
            ranks.agents[2].await_state("ready")
            assert held(ranks)[:2] == before[:2]
            leases = [lease.lease for lease in ranks.agents[0].status().sets[0].leases]
            assert leases == [engine.message.lease, another.message.lease]
    assert one_group(ranks) == group


def test_other_bytes_are_no_way_back(ranks: Ranks) -> None:
    """What is loaded then is another load of all ranks, and what they held goes."""
    group = loaded(ranks)
    before = held(ranks)
    ranks.seed(7)
    lose(ranks, [1])
    ranks.load(1).result(SECONDS)
    assert one_group(ranks) != group
    assert not {entry[0] for sets in held(ranks) for entry in sets} & {entry[0] for sets in before for entry in sets}
    assert sorted(disk_loads(ranks)) == sorted([*ALL, *ALL[:1], "rank 1 loads, alone", *ALL[2:]])
    for agent in ranks.agents:
        with agent.attach(wait=0.0) as engine:
            assert contents(engine) == [
                test_loader.arena_bytes(7, n, size) for n, size in enumerate(test_loader.ARENAS)
            ]


def test_another_configuration_is_no_way_back(ranks: Ranks) -> None:
    """The agents hold what they loaded with an earlier one; whoever asks gets what all are configured for."""
    group = loaded(ranks)
    ranks.configure(policy={"unproven": "check"})
    lose(ranks, range(RANKS))
    ranks.load(0).result(SECONDS)
    assert one_group(ranks) != group


def test_again_is_for_all(ranks: Ranks) -> None:
    group = loaded(ranks)
    lose(ranks, [1])
    load_again(ranks.agents[0])
    assert one_group(ranks) != group
    assert disk_loads(ranks).count("rank 0 loads, with all") == 2


def test_an_engine_that_maps_what_was_lost_is_not_disturbed(ranks: Ranks) -> None:
    """Its GPU holds the weights that this agent does not know, so that there may be no room for others."""
    group = loaded(ranks)
    before = held(ranks)
    ranks.agents[1].stop()
    ranks.agents[1].start()
    with ranks.agents[1].renew(before[1][0][0]) as engine:
        assert engine.message.resident is False
        # An engine that attaches and finds nothing: nobody asked for more than weights.
        with pytest.raises(InUse) as refused, ranks.agents[1].attach():
            pass
        assert f"pid {os.getpid()} still uses weights that this rank does not hold any more" in str(refused.value)
        assert held(ranks) == [before[0], [], before[2]]
        eventually(lambda: _loads(ranks, 1), what="what an operator asks for is not loaded")
    assert one_group(ranks) == group


@pytest.mark.parametrize("gate", ["begun-1", "loading-1", "staged-1"])
def test_who_is_killed_meanwhile_takes_nothing_from_the_others(ranks: Ranks, gate: str) -> None:
    group = loaded(ranks)
    before = held(ranks)
    ranks.agents[0].gate(gate)
    lose(ranks, [1])
    loading = ranks.load(1)
    ranks.agents[0].reached(gate)
    ranks.agents[1].stop(signal.SIGKILL)
    failure(loading)
    eventually(lambda: ranks.agents[0].status().progress is None, what="the launch goes on")
    ranks.agents[0].lift(gate)
    ranks.agents[1].start()
    assert held(ranks) == [before[0], [], before[2]]
    ranks.load(1).result(SECONDS)
    assert one_group(ranks) == group


def test_what_is_evicted_meanwhile_is_not_gone_on_with(ranks: Ranks) -> None:
    group = loaded(ranks)
    ranks.agents[0].gate("loading-1")
    lose(ranks, [1])
    loading = ranks.load(1)
    ranks.agents[0].reached("loading-1")
    ranks.agents[2].ask(protocol.Evict(None))
    ranks.agents[0].open("loading-1")
    ranks.agents[2].await_state("failed")
    error = ranks.agents[2].status().error
    assert error is not None
    assert "this rank lost its weights while others loaded theirs" in error.message
    loading.exception(SECONDS)  # one or the other: its own commit comes at the same time
    for rank in (1, 2):
        eventually(lambda rank=rank: _loads(ranks, rank), what=f"rank {rank} does not load")  # type: ignore[misc]
    assert one_group(ranks) == group


def _loads(ranks: Ranks, rank: int) -> bool:
    try:
        ranks.agents[rank].load()
    except WeightcacheError:  # the pause after a failure
        return False
    return True


def publishing(made: test_loader.Made, *claimed: str) -> protocol.Publish:
    return protocol.Publish(made.info, claimed)


def told(info: SetInfo) -> str:
    return content_of(info, encode(test_loader.content([arena.used for arena in info.arenas])))


@pytest.mark.parametrize("wrong", ["another", "none of these", "too many"])
def test_a_publisher_that_says_what_is_not_so(ranks: Ranks, wrong: str) -> None:
    """The agent computes what it is told: nothing depends on the loader's word."""
    agent = ranks.agents[0]
    agent.configure(model=None)
    agent.start()
    with agent.attach(donate=True) as invited:
        assert isinstance(invited.message, protocol.DonationInvited)
        made = test_loader.make(test_loader.fingerprint())
        right = told(made.info)
        claims = {"another": ("0" * 32,), "none of these": ("x",), "too many": (right, right)}
        with donation(agent, invited.message.token) as conversation, pytest.raises(ProtocolError):
            test_loader.publish(conversation, made, claims[wrong])
    assert agent.status().sets == ()
    with agent.attach(donate=True) as invited, donation(agent, invited.message.token) as conversation:
        test_loader.publish(conversation, test_loader.make(test_loader.fingerprint()), (right,))
        conversation.request(protocol.Commit(1), protocol.Committed)


@pytest.mark.parametrize("request_", [protocol.Retain("g"), protocol.Borrow("target", test_loader.fingerprint())])
def test_nothing_is_lent_to_who_brings_the_first_weights(ranks: Ranks, request_: protocol.Message) -> None:
    agent = ranks.agents[0]
    agent.configure(model=None)
    agent.start()
    with agent.attach(donate=True) as invited, donation(agent, invited.message.token) as conversation:
        conversation.send(request_)
        with pytest.raises(WeightcacheError, match=r"nothing to retain|holds no target weights"):
            conversation.receive(SECONDS)


def test_what_is_not_what_was_lost_is_not_taken(ranks: Ranks) -> None:
    agent = ranks.agents[0]
    agent.configure(model=None)
    agent.start()
    made = test_loader.make(test_loader.fingerprint())
    with agent.attach(donate=True) as invited, donation(agent, invited.message.token) as conversation:
        conversation.request(protocol.Rejoin("a-group", "target", "0" * 32), protocol.Accepted, SECONDS)
        with pytest.raises(ProtocolError, match="not those which this rank lost"):
            test_loader.publish(conversation, made, (told(made.info),))
    assert agent.status().sets == ()
