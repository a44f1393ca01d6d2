"""What happens in each state of a rank at a start, at an attach, and when the agent is restarted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.systemd.machine import Machine
from tests.systemd.rank import CANARY, CONFIG, ONE_SET, Client, Rank, configuration, eventually
from weightcache.errors import CheckpointError, Degraded, Drained, LoadFailed, StillLoading
from weightcache.protocol import Drain, Hello, Load, Resume, Welcome

FAILING = configuration({"WCTEST_MODE": "abort"})
WRONG = "the checkpoint /models/none is missing"


def start(rank: Rank) -> int:
    """``systemctl start``; its exit status."""
    return rank.machine.run("systemctl", "start", rank.service, check=False).returncode


def empty(rank: Rank) -> None:
    """An agent that was started by somebody who asked for nothing."""
    with rank.public() as asking:
        assert asking.request(Hello("test", "1"), Welcome).state == "empty"
    rank.await_active()


# Empty


def test_empty_a_start_loads_and_is_ready_with_the_weights(rank: Rank) -> None:
    assert start(rank) == 0
    assert (rank.status().state, len(rank.ids()), rank.stored) == ("ready", 1, ONE_SET)


def test_empty_who_says_hello_starts_an_agent_that_loads_nothing(rank: Rank) -> None:
    empty(rank)
    assert rank.status_text == "empty"
    assert rank.status().state == "empty"
    assert rank.stored == CANARY
    assert rank.count("load-began") == (0,)


def test_empty_an_attach_loads(rank: Rank) -> None:
    empty(rank)
    with Client(rank) as client:
        client.unharmed()
        assert rank.ids() == [client.set_id]


def test_empty_a_restarted_agent_loads(rank: Rank) -> None:
    empty(rank)
    assert len(rank.successor(rank.kill()).sets) in (0, 1)
    rank.await_state("ready")
    assert rank.count("load-began") == (1,)


# Loading


def test_loading_a_start_waits(rank: Rank) -> None:
    rank.gate("loading")
    with rank.machine.popen(["systemctl", "start", rank.service]) as starting:
        rank.reached("loading")
        rank.begin()
        assert rank.show("ActiveState") == {"ActiveState": "activating"}
        assert starting.poll() is None
        rank.open("loading")
        assert starting.wait(30) == 0
    assert rank.status().state == "ready"


def test_loading_an_attach_is_told_and_waits_as_long_as_it_wants_to(rank: Rank) -> None:
    rank.gate("loading")
    rank.begin()
    rank.reached("loading")
    with pytest.raises(StillLoading, match="phase loading, 65536 of 131072 bytes"), rank.attach(wait=0.0):
        pass
    with rank.public() as asking:
        asking.send(Load(30.0))
        progress, _ = asking.receive()
        assert progress.progress.phase == "loading"  # type: ignore[union-attr]
        rank.open("loading")
    with rank.attach() as held:
        assert [held.message.set_id] == rank.ids()
    assert rank.count("load-began") == (1,)


def test_loading_a_restarted_agent_loads_again(rank: Rank) -> None:
    rank.gate("loading")
    rank.begin()
    first = rank.reached("loading")
    rank.kill()
    second = rank.reached("loading")
    eventually(lambda: not rank.alive(first))
    assert rank.alive(second)
    rank.open("loading")
    rank.await_active()
    assert rank.count("load-began", "set-published") == (2, 1)


# Ready: test_kill.py and test_agent.py have the restarts


def test_ready_a_start_and_an_attach_find_it_served(rank: Rank) -> None:
    [kept] = rank.ready().sets
    assert start(rank) == 0
    with rank.attach() as first, rank.attach() as second:
        assert first.message.set_id == second.message.set_id == kept.id
        eventually(lambda: "2 engines" in rank.status_text)


def test_ready_a_restarted_agent_is_up_at_once_and_checks_behind(rank: Rank) -> None:
    rank.ready()
    rank.write(configuration({"WCTEST_MODE": "check-hang"}))
    rank.killed()
    with rank.attach() as held:
        assert [held.message.set_id] == rank.ids()
    rank.write(configuration())
    rank.killed()
    eventually(lambda: rank.count("verified") == (1,))


def test_ready_before_ready_means_that_the_check_comes_first(rank: Rank) -> None:
    rank.write(configuration(more='[policy]\nverify_adopted = "before-ready"\n'))
    rank.ready()
    rank.gate("checking")
    killed = rank.kill()
    rank.reached("checking")
    assert rank.show("ActiveState") == {"ActiveState": "activating"}
    rank.open("checking")
    rank.successor(killed)
    assert rank.count("verified") == (1,)


# Failed, by a load


def test_failed_a_start_fails_and_the_automatic_restart_loads_nothing(rank: Rank) -> None:
    rank.write(FAILING)
    assert start(rank) == 1
    rank.await_active()
    assert rank.status_text == f"failed: {WRONG}"
    status = rank.status()
    assert (status.state, status.error and status.error.code) == ("failed", "checkpoint")
    assert rank.restarts == 1
    assert rank.stored == CANARY
    # A second start finds an agent that is up; a restart means: try again.
    assert start(rank) == 0
    assert rank.count("load-began") == (1,)
    rank.write(configuration())
    rank.machine.systemctl("restart", rank.service)
    assert rank.status().state == "ready"
    assert rank.count("load-began") == (2,)


def test_failed_an_attach_tries_again_but_not_at_once(rank: Rank) -> None:
    rank.write(FAILING)
    start(rank)
    rank.await_active()
    with pytest.raises(CheckpointError, match=WRONG), rank.attach():
        pass
    with pytest.raises(LoadFailed, match=rf"the next try is allowed in \d+ s: {WRONG}"), rank.attach():
        pass
    assert rank.count("load-began") == (2,)
    eventually(lambda: tries(rank) == 3)
    assert rank.restarts == 1


def tries(rank: Rank) -> int:
    """Ask once more; how many loads there were."""
    with pytest.raises((CheckpointError, LoadFailed)), rank.attach():
        pass
    return rank.count("load-began")[0]


def test_failed_a_restarted_agent_loads_nothing_by_itself(rank: Rank) -> None:
    rank.write(FAILING)
    start(rank)
    rank.await_active()
    rank.write(configuration())
    for _ in range(2):
        assert rank.killed().state == "failed"
        assert rank.status_text == f"failed: {WRONG}"
    assert rank.count("load-began") == (1,)
    with rank.attach() as held:
        assert rank.ids() == [held.message.set_id]
    assert rank.killed().error is None


def test_failed_many_clients_start_a_load_that_fails_and_each_is_told(rank: Rank) -> None:
    rank.write(FAILING)
    for _ in range(2):
        with pytest.raises((CheckpointError, LoadFailed), match=WRONG), rank.attach():
            pass
    eventually(lambda: rank.restarts == 1)
    rank.await_active()
    assert rank.show("ActiveState") == {"ActiveState": "active"}
    assert rank.machine.show(rank.socket, "ActiveState") == {"ActiveState": "active"}


# Drained


def drained(rank: Rank) -> None:
    rank.ready()
    rank.ask(Drain(10.0))
    assert_drained(rank)


def assert_drained(rank: Rank) -> None:
    assert rank.status().state == "drained"
    eventually(lambda: rank.status_text.startswith("drained by uid 0 at "))
    assert rank.stored == CANARY
    with pytest.raises(Drained, match="until `wcache resume`"), rank.attach():
        pass
    assert rank.count("load-began") == (1,)


def test_drained_holds_over_every_restart_until_resume(rank: Rank) -> None:
    drained(rank)
    rank.no_arenas()
    rank.killed()
    assert_drained(rank)
    rank.machine.systemctl("restart", rank.service)
    assert_drained(rank)
    rank.machine.systemctl("stop", rank.service)
    assert start(rank) == 0
    assert_drained(rank)
    told = rank.machine.run("wcache", "resume", "--rank", "0")
    assert "gives out again" in told.stdout
    with rank.attach() as held:
        assert rank.ids() == [held.message.set_id]
    rank.killed()
    assert rank.count("load-began", "set-adopted") == (2, 1)


def test_drained_who_uses_the_weights_keeps_them_and_is_named(rank: Rank) -> None:
    rank.ready()
    with Client(rank) as client:
        told = rank.machine.run("wcache", "drain", "--rank", "0", "--wait", "0", check=False)
        assert told.returncode == 1
        assert f"pid {client.pid} " in told.stderr
        assert rank.stored == ONE_SET
        [kept] = rank.killed().sets
        assert kept.id == client.set_id
        eventually(client.leased)
        client.unharmed()
        with pytest.raises(Drained), rank.attach():
            pass
    eventually(lambda: rank.stored == CANARY)
    rank.no_arenas()
    assert rank.status().state == "drained"
    rank.ask(Resume())


def test_drained_ends_with_a_reboot(boot: Callable[..., Machine], trusting: None) -> None:
    machine = boot(enable=["weightcache@0.socket"], files={CONFIG: configuration()})
    rank = Rank(machine)
    drained(rank)
    machine.reboot()
    rank.locate()
    rank.mark()
    with rank.attach() as held:
        assert rank.ids() == [held.message.set_id]


# Degraded


def degraded(rank: Rank, policy: str) -> str:
    """Weights that do not fit their digests, as the check after an adoption finds them."""
    rank.write(configuration({"WCTEST_MODE": "wrong-digest"}, more=f'[policy]\ndamaged = "{policy}"\n'))
    [bad] = rank.ready().sets
    rank.killed()
    return bad.id


def test_degraded_is_refused_until_evicted_whatever_restarts(rank: Rank) -> None:
    bad = degraded(rank, "hold")
    for _ in range(2):
        rank.await_state("degraded")
        assert rank.ids() == [bad]
        eventually(lambda: rank.status_text.startswith(f"degraded: set {bad} is damaged"))
        with pytest.raises(Degraded, match="wcache evict"), rank.attach():
            pass
        rank.killed()
    rank.await_state("degraded")
    rank.write(configuration(more='[policy]\ndamaged = "hold"\n'))
    rank.machine.run("wcache", "evict", "--rank", "0")
    rank.machine.systemctl("restart", rank.service)
    with rank.attach() as held:
        assert held.message.set_id != bad
    # It was found once, and known ever after.
    assert rank.count("load-began", "verification-failed") == (2, 1)


def test_degraded_is_replaced_where_the_policy_says_so(rank: Rank) -> None:
    rank.write(configuration({"WCTEST_MODE": "wrong-digest"}))
    [bad] = rank.ready().sets
    rank.write(configuration())
    rank.killed()
    eventually(lambda: rank.ids() not in ([], [bad.id]))
    assert rank.stored == ONE_SET
    with rank.attach() as held:
        assert held.message.set_id != bad.id
    assert rank.count("load-began", "verification-failed", "set-dropped") == (2, 1, 1)
