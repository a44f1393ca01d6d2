"""Evict, drain, resume, verify, inspect, renew."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.test_loader import fingerprint
from tests.unit.server.harness import Agent, contents, eventually, outcome
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import (
    DamagedSet,
    Degraded,
    Drained,
    Empty,
    InUse,
    Mismatch,
    PermissionRefused,
    StillLoading,
    WeightcacheError,
)
from weightcache.protocol import Done, Drain, Evict, Inspect, Resume, Verified, Verify


@pytest.fixture
def ready(agent: Agent) -> Agent:
    """An agent that holds its model."""
    agent.start("--load")
    agent.await_state("ready")
    return agent


def test_evict(ready: Agent) -> None:
    before = ready.fds()
    with ready.attach():
        with pytest.raises(InUse, match=rf"pid {os.getpid()}"):
            ready.ask(Evict(None))
        assert ready.status().state == "ready"
    eventually(lambda: not ready.status().sets[0].leases)
    assert "131072 bytes" in ready.ask(Evict(ready.status().sets[0].id)).text
    assert ready.status().state == "empty"
    ready.await_fds(before - 3)
    with pytest.raises(Empty):
        ready.ask(Evict("0" * 12))
    assert "nothing" in ready.ask(Evict(None)).text


def test_evict_by_force_makes_orphans(ready: Agent) -> None:
    with ready.attach() as held:
        ready.ask(Evict(None, force=True))
        status = ready.status()
        assert (status.sets, [o.pid for o in status.orphans]) == ((), [os.getpid()])
        assert len(contents(held)[0]) == 65536
    eventually(lambda: not ready.status().orphans)


def test_versions_go_on_counting(ready: Agent) -> None:
    ready.ask(Evict(None))
    ready.load()
    assert ready.status().sets[0].version == 2


def test_drain_holds_over_restarts_until_resume(ready: Agent) -> None:
    assert "drained" in ready.ask(Drain(5.0)).text
    for _ in range(2):
        status = ready.status()
        assert (status.state, status.sets) == ("drained", ())
        assert status.drained is not None
        assert status.drained.uid == os.getuid()
        for ask in (ready.attach, ready.load):
            with pytest.raises(Drained, match=rf"drained by uid {os.getuid()} at \d{{4}}-.* until `wcache resume`"):
                ask()
        with pytest.raises(Drained):
            ready.attach(donate=True)
        ready.stop()
        ready.start("--load")
    ready.ask(Resume())
    assert ready.status().state == "empty"
    ready.load()
    assert "not drained" in ready.ask(Resume()).text


def test_drain_waits_and_says_who_holds_what(ready: Agent) -> None:
    with ready.attach() as held:
        with pytest.raises(InUse, match=rf"set {held.message.set_id} is in use by pid {os.getpid()}"):
            ready.ask(Drain(0.2))
        assert ready.status().state == "drained"
        assert len(ready.status().sets) == 1
        with Conversation(ready.paths.status) as conversation:
            conversation.send(Drain(10.0))
            time.sleep(0.1)
            held.close()
            assert isinstance(conversation.receive()[0], Done)
    assert ready.status().sets == ()


def test_a_drained_set_goes_with_its_last_lease(ready: Agent) -> None:
    with ready.attach(), pytest.raises(InUse):
        ready.ask(Drain(0.0))
    eventually(lambda: not ready.status().sets)


def test_drain_cancels_a_load(agent: Agent) -> None:
    agent.gate("loading")
    agent.start()
    before = agent.fds()
    with agent.public() as conversation:
        conversation.send(protocol.Load(20.0))
        pid = agent.reached("loading")
        agent.ask(Drain(5.0))
        with pytest.raises(Drained):
            outcome(conversation)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    agent.ask(Resume())
    assert agent.status().state == "empty"  # not failed: nothing was wrong with the load
    agent.await_fds(before)


def test_verify(ready: Agent) -> None:
    verified = ready.ask(Verify(), Verified)
    assert (verified.sets, verified.bytes) == (1, 131072)
    ready.ask(Evict(None))
    with pytest.raises(Empty):
        ready.ask(Verify(), Verified)


def test_damage_degrades_the_rank_until_the_set_is_evicted(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "wrong-digest"}, policy={"damaged": "hold"})
    agent.start("--load")
    agent.await_state("ready")
    with agent.attach():
        with pytest.raises(DamagedSet, match=r"arenas \[0, 1\] differ"):
            agent.ask(Verify(), Verified)
        status = agent.status()
        assert status.state == "degraded"
        assert status.error is not None
        assert status.error.code == "damaged"
        for ask in (agent.attach, agent.load):
            with pytest.raises(Degraded, match="wcache evict"):
                ask()
        with pytest.raises(DamagedSet):
            agent.ask(Verify(), Verified)
        agent.ask(Evict(None, force=True))
    assert agent.status().state == "empty"


@pytest.mark.parametrize(("mode", "sentence"), [("check-crash", "SIGKILL"), ("check-hang", "did not end within 1 s")])
def test_a_check_without_an_answer_changes_nothing(agent: Agent, mode: str, sentence: str) -> None:
    agent.configure({"WCTEST_MODE": mode}, loader={"timeout_seconds": 1.0})
    agent.start("--load")
    agent.await_state("ready")
    before = agent.fds()
    with pytest.raises(WeightcacheError, match=sentence):
        agent.ask(Verify(), Verified)
    assert agent.status().state == "ready"
    agent.await_fds(before)


def test_inspect_is_no_lease(ready: Agent) -> None:
    with Conversation(ready.paths.status) as conversation:
        conversation.send(Inspect(None))
        message, fds = conversation.receive(max_fds=transport.MAX_FDS)
        assert isinstance(message, protocol.Attached)
        assert len(fds) == 3
        ready.ask(Evict(None))
        assert len(os.pread(fds[1], 65536, 0)) == 65536
        transport.close_all(fds)
    with Conversation(ready.paths.status) as conversation:
        conversation.send(Inspect("nothing"))
        with pytest.raises(Empty):
            conversation.receive()


def test_a_known_set_is_renewed_and_an_unknown_one_is_remembered(ready: Agent) -> None:
    set_id = ready.status().sets[0].id
    with ready.renew(set_id) as held:
        assert held.message.resident
        with pytest.raises(InUse):
            ready.ask(Evict(None))
    with ready.attach() as engine:
        ready.stop()
        ready.start()
        with ready.renew(engine.message.set_id) as held:
            assert not held.message.resident
            assert [o.pid for o in ready.status().orphans] == [os.getpid()]
            assert ready.status().state == "empty"
        eventually(lambda: not ready.status().orphans)


def test_eviction_by_a_client_is_a_matter_of_policy(ready: Agent) -> None:
    with pytest.raises(Mismatch, match="clients_may_evict_unleased is off"):
        ready.attach(fingerprint(tp_size=2), evict=True)
    ready.stop()
    ready.configure({"WCTEST_FINGERPRINT": '{"tp_size": 2}'}, policy={"clients_may_evict_unleased": True})
    ready.start("--load")
    ready.await_state("ready")
    with ready.attach(fingerprint(tp_size=2)):
        with pytest.raises(Mismatch, match=rf"in use by pid {os.getpid()}"):
            ready.attach(evict=True)
        with pytest.raises(Mismatch):
            ready.attach()
    eventually(lambda: not ready.status().sets[0].leases)
    with pytest.raises(Mismatch):  # evicted and loaded again, once: the configured model is another one
        ready.attach(evict=True)
    assert [s.version for s in ready.status().sets] == [2]
    with ready.attach(evict=True, donate=True) as donor:
        assert isinstance(donor.message, protocol.DonationInvited)
        assert ready.status().sets == ()


def test_a_failed_load_is_remembered_by_the_next_agent(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "exit"})
    agent.start("--load")
    agent.await_state("failed")
    agent.stop(signal.SIGKILL)
    agent.configure()
    agent.start("--load")
    status = agent.status()
    assert status.state == "failed"
    assert status.error is not None
    assert "status 3" in status.error.message
    agent.gate("begun")
    with pytest.raises(StillLoading):
        agent.load(wait=0.0)
    assert not agent.paths.failed_marker.exists()
    agent.reached("begun")
    agent.open("begun")
    assert agent.await_state("ready").error is None
    agent.stop()
    agent.start("--load")
    agent.await_state("ready")


def test_a_failed_load_is_forgotten_by_an_agent_that_was_told_to_stop(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "exit"})
    agent.start("--load")
    agent.await_state("failed")
    agent.stop()
    agent.configure()
    agent.start("--load")
    assert agent.await_state("ready").error is None


@pytest.mark.parametrize("mode", ["wrong-digest", "check-fault"])
def test_a_damaged_set_is_replaced(agent: Agent, mode: str) -> None:
    agent.configure({"WCTEST_MODE": mode})
    agent.start("--load")
    first = agent.await_state("ready").sets[0].id
    with agent.attach() as held:
        with pytest.raises(DamagedSet):
            agent.ask(Verify(), Verified)
        eventually(lambda: [s.id for s in agent.status().sets] not in ([], [first]))
        assert contents(held)
        assert [lease.pid for lease in agent.status().orphans] == [os.getpid()]


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_others_may_not_operate(ready: Agent) -> None:
    ready.paths.status.chmod(0o666)
    ready.folder.chmod(0o755)
    pid = os.fork()
    if not pid:  # no pytest in here: leave by the shortest way
        try:
            os.setuid(65534)
            for message in (Evict(None), Drain(0.0), Resume(), Verify()):
                try:
                    ready.ask(message)
                except PermissionRefused:
                    continue
                os._exit(1)
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ready.status().state == "ready"
