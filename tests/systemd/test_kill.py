"""SIGKILL of the agent at every stage of a set's life, many times: what was acknowledged is never loaded again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.test_loader import ARENAS, arena_bytes
from tests.systemd.machine import Machine
from tests.systemd.rank import CANARY, ONE_SET, Client, Rank, configuration, eventually, gated, reset
from tests.unit.server.harness import contents
from weightcache.protocol import Evict, Load

THOROUGH = "252"
"""The version with all repetitions; the other one gets a quarter, as do stages that hardly differ from another one."""
FEW, MANY = 5, 20
BYTES = [arena_bytes(0, number, size) for number, size in enumerate(ARENAS)]


@pytest.fixture(scope="module")
def agents(agents: Machine) -> Iterator[Machine]:
    """The same machine, which waits less before it starts an agent again: how long is nothing to these tests."""
    with agents.drop_in("weightcache@.service", "[Service]\nRestartSec=10ms\n"):
        yield agents


@pytest.fixture
def times(systemd: str) -> int:
    return MANY if systemd == THOROUGH else FEW


@pytest.fixture
def gates(agents: Machine, rank: Rank) -> Iterator[None]:
    """An agent with gates inside, instead of the loader's."""
    with agents.drop_in(rank.service, gated()), rank.inside_agent():
        yield
        rank.open_all()


@pytest.mark.parametrize("point", ["started", "loading", "staged", "complete"])
def test_before_the_commit(rank: Rank, point: str, times: int) -> None:
    rank.gate(point)
    rank.begin()
    for number in range(times):
        loader = rank.reached(point)
        status = rank.status()
        assert (status.state, status.sets) == ("loading", ())
        assert rank.stored == CANARY
        assert rank.restarts == number
        assert rank.alive(loader)
        rank.kill()
    rank.reached(point)
    rank.open(point)
    rank.await_active()
    [kept] = rank.ids()
    assert rank.stored == ONE_SET
    # Each of the killed agents had begun, and none had published.
    assert rank.count("load-began", "set-published") == (times + 1, 1)
    rank.no_loader()
    with Client(rank) as client:
        assert client.set_id == kept
        client.unharmed()


def test_while_storing(rank: Rank, gates: None) -> None:
    rank.gate("storing")
    rank.begin()
    for _ in range(FEW):
        rank.reached("storing")
        assert rank.stored == CANARY + 1  # what an earlier agent left of half a set is removed
        rank.kill()
    rank.reached("storing")
    assert rank.stored == CANARY + 1
    rank.open("storing")
    rank.await_active()
    assert rank.count("load-began", "set-adopted", "set-published") == (FEW + 1, 0, 1)
    assert rank.stored == ONE_SET


@pytest.mark.parametrize("point", ["stored", "committed"])
def test_between_store_and_acknowledgement(rank: Rank, gates: None, point: str, times: int) -> None:
    """The loader does not know it yet, but everything is in the store: it is adopted, and nothing is loaded again."""
    times = FEW if point == "committed" else times
    rank.gate(point)
    for number in range(times):
        if number:
            rank.ask(Evict(None))
            with rank.public() as asking:
                asking.send(Load(0.0))
        else:
            rank.begin()
        rank.reached(point)
        assert rank.stored == ONE_SET
        [kept] = rank.killed().sets
        assert rank.stored == ONE_SET
        with rank.attach() as held:
            assert held.message.set_id == kept.id
            assert contents(held) == BYTES
        eventually(lambda: not rank.status().sets[0].leases)
    published = times if point == "committed" else 0
    assert rank.count("load-began", "set-published", "set-adopted") == (times, published, times)
    rank.no_loader()


def test_while_serving(rank: Rank, times: int) -> None:
    [kept] = rank.ready().sets
    with Client(rank) as client:
        for number in range(times):
            eventually(client.leased)
            assert [resident.id for resident in rank.killed().sets] == [kept.id]
            assert rank.stored == ONE_SET
            assert rank.restarts == number + 1
            client.unharmed()
        assert rank.count("load-began", "set-adopted", "verification-failed") == (1, times, 0)


@pytest.mark.parametrize("point", ["adopting", "adopted"])
def test_during_adoption(rank: Rank, gates: None, point: str, times: int) -> None:
    """Each successor is killed on its way up: the store has everything all the same."""
    times = FEW if point == "adopted" else times
    [kept] = rank.ready().sets
    with Client(rank) as client:
        rank.gate(point)
        rank.kill()
        for number in range(times):
            rank.reached(point)
            assert rank.stored == ONE_SET
            assert rank.show("SubState") == {"SubState": "start"}
            assert rank.restarts == number + 1
            rank.kill()
            client.unharmed()
        rank.reached(point)
        rank.open(point)
        rank.await_active()
        assert rank.ids() == [kept.id]
        assert rank.stored == ONE_SET
        eventually(client.leased)
        client.unharmed()
    assert rank.count("load-began", "set-adopted") == (1, times + 1)


# That these tests can fail


def keeps(rank: Rank) -> None:
    """What every test above is about, once."""
    rank.mark()
    [kept] = rank.ready().sets
    with Client(rank) as client:
        assert [resident.id for resident in rank.killed().sets] == [kept.id]
        assert rank.count("load-began") == (1,)
        client.unharmed()


def test_a_set_that_is_not_stored_is_noticed(agents: Machine, rank: Rank) -> None:
    small = f"FileDescriptorStoreMax={ONE_SET - 2}\n"
    keeps(rank)
    reset(agents, configuration())
    with agents.drop_in(rank.service, gated("WCTEST_BLIND=1")):
        keeps(rank)
        reset(agents, configuration())
    # The loader is told that its set is safe, and it is not.
    with agents.drop_in(rank.service, gated("WCTEST_BLIND=1") + small):
        with pytest.raises(AssertionError):
            keeps(rank)
        assert rank.count("load-began", "set-published", "store-rejected") == (2, 2, 0)
        reset(agents, configuration())
    with agents.drop_in(rank.service, gated() + small):
        with pytest.raises(AssertionError, match="status 1"):
            keeps(rank)
        assert rank.count("set-published") == (0,)
