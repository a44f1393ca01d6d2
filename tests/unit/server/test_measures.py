"""What an agent counts and times for its metrics."""

from __future__ import annotations

import time

import pytest

from tests.unit.server.harness import Agent, donation, eventually
from weightcache import protocol
from weightcache.status import ATTACH_BOUNDS, Measured


def measured(agent: Agent) -> Measured:
    return agent.status().measured


def test_nothing_happened_yet(agent: Agent) -> None:
    started = time.time()
    got = measured(agent.start())
    assert abs(got.started_at - started) < 10
    assert got == Measured(got.started_at, got.started_at, (0,) * (len(ATTACH_BOUNDS) + 1))


def test_attaches_are_timed_unless_they_waited_for_a_load(agent: Agent) -> None:
    agent.start()
    with agent.attach():
        assert sum(measured(agent).attaches) == 0
    began = time.monotonic()
    for _ in range(3):
        agent.attach().close()
    most = time.monotonic() - began
    eventually(lambda: sum(measured(agent).attaches) == 3)
    got = measured(agent)
    assert 0 < got.attach_seconds < most
    assert not got.attaches[-1]


def test_the_end_of_a_lease_is_remembered(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    first = measured(agent)
    assert first.leased_at == first.started_at
    agent.attach().close()
    eventually(lambda: measured(agent).leased_at > first.leased_at)
    assert abs(measured(agent).leased_at - time.time()) < 10


def test_loads_by_source_and_result(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "abort"})
    agent.start("--load")
    agent.await_state("failed")
    assert measured(agent).loads == {"loader:failed": 1}
    agent.stop()
    agent.configure()
    agent.start()
    agent.load()
    got = measured(agent)
    assert got.loads == {"loader:published": 1}
    assert 0 < got.load_seconds["loader"] < 15


def test_donations_are_another_source(agent: Agent) -> None:
    agent.configure(model=None)
    agent.start()
    with agent.attach(donate=True) as held:
        assert isinstance(held.message, protocol.DonationInvited)
        with donation(agent, held.message.token) as donor:
            donor.send(protocol.Abort("checkpoint", "no"))
        eventually(lambda: measured(agent).loads)
    assert sum(measured(agent).loads.values()) == 1
    assert next(iter(measured(agent).loads)).startswith("donor:")


def test_an_agent_that_is_older_says_nothing(agent: Agent) -> None:
    status = agent.start().status()
    plain = protocol.records.to_plain(status)
    del plain["measured"]
    assert protocol.records.from_plain(protocol.RankStatus, plain).measured == Measured()


def test_failed_verifications_are_counted_by_their_code(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "wrong-digest"}, policy={"damaged": "hold"})
    agent.start("--load")
    agent.await_state("ready")
    with pytest.raises(Exception, match="damaged"):
        agent.ask(protocol.Verify(), protocol.Verified)
    assert agent.status().counts["verification-failed:damaged"] == 1
