"""The publish socket: what is taken, what is refused, and that nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import test_loader
from tests.support.test_loader import fingerprint
from tests.unit.server.harness import Agent, donation, eventually, gone, outcome
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import CheckpointError, LoadFailed, PermissionRefused, ProtocolError, WeightcacheError

GATES = ("started", "begun", "loading", "staged", "complete")


@pytest.mark.parametrize("gate", GATES)
def test_a_loader_killed_at_any_point_leaves_nothing(agent: Agent, gate: str) -> None:
    agent.gate(gate)
    agent.configure({"WCTEST_ROLES": "target,draft-1"})
    agent.start()
    before = agent.fds()
    with agent.public() as conversation:
        conversation.send(protocol.Load(20.0))
        os.kill(agent.reached(gate), 9)
        with pytest.raises(LoadFailed, match=r"signal 9 .SIGKILL.: test loader|signal 9 .SIGKILL."):
            outcome(conversation)
    status = agent.status()
    assert (status.state, status.sets, status.progress) == ("failed", (), None)
    agent.await_fds(before)


def test_a_loader_killed_after_the_commit_takes_nothing_away(agent: Agent) -> None:
    agent.gate("committed")
    agent.start("--load")
    os.kill(agent.reached("committed"), 9)
    assert agent.status().state == "ready"
    with agent.attach() as held:
        assert isinstance(held.message, protocol.Attached)


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("bad-token", "belongs to no load"),
        ("unsealed", "arena 1 is no sealed memory file"),
        ("wrong-size", "arena 1 has 65024 bytes, announced were 65536"),
        ("unsealed-manifest", "not sealed"),
        ("bad-manifest", "malformed manifest"),
        ("large-manifest", "a manifest of 131584 bytes"),
        ("missing-fd", "2 descriptors for a manifest and 2 arenas"),
        ("wrong-count", "a commit of 2 sets where 1 were published"),
        ("exit", "ended with status 3"),
        ("close", "closed its connection early"),
    ],
)
def test_what_is_refused(agent: Agent, mode: str, sentence: str) -> None:
    agent.configure({"WCTEST_MODE": mode})
    agent.start()
    before = agent.fds()
    with pytest.raises(WeightcacheError) as refused:
        agent.load()
    status = agent.status()
    assert (status.state, status.sets) == ("failed", ())
    assert status.error is not None
    assert sentence in (status.error.message if mode != "bad-token" else agent.text())
    assert str(refused.value) == status.error.message
    agent.await_fds(before)


def test_the_loaders_own_error_is_told(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "abort"})
    agent.start()
    with pytest.raises(CheckpointError, match="/models/none"):
        agent.attach()
    error = agent.status().error
    assert error is not None
    assert error.code == "checkpoint"


@pytest.mark.parametrize(
    ("mode", "key", "sentence"),
    [("deaf", "stall_seconds", "no progress for 1 s"), ("hang", "timeout_seconds", "took longer than 1 s")],
)
def test_a_hung_loader_is_killed(agent: Agent, mode: str, key: str, sentence: str) -> None:
    agent.configure({"WCTEST_MODE": mode}, loader={key: 1.0})
    agent.gate("started")
    agent.start("--load")
    pid = agent.reached("started")
    agent.open("started")
    assert sentence in str(agent.await_state("failed").error)
    assert gone(pid)


def test_a_lingering_loader_does_not_delay_and_is_ended_by_the_agents_end(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "linger"})
    agent.gate("begun")
    agent.start("--load")
    pid = agent.reached("begun")
    agent.open("begun")
    agent.await_state("ready")
    assert not gone(pid)
    assert agent.stop() == 0
    assert gone(pid)


def test_what_a_loader_leaves_running_is_ended(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "leave-child"})
    agent.start("--load")
    agent.await_state("ready")
    eventually(lambda: not _session_members(agent))


def _session_members(agent: Agent) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(agent.gates).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_much_output_is_kept_short(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "flood", "WCTEST_ROLES": "nonsense"})
    agent.start()
    with pytest.raises(ProtocolError, match="role 'nonsense'"):
        agent.load()
    assert "line 4999" in agent.text()


def test_the_loader_cannot_be_started(agent: Agent) -> None:
    agent.configure(loader={"command": ["/nonexistent/loader"]})
    agent.start()
    with pytest.raises(LoadFailed, match=r"the loader cannot be started \('/nonexistent/loader': No such file"):
        agent.load()


def test_a_token_is_good_for_one_load_and_one_connection(agent: Agent) -> None:
    agent.configure({"X": "1"}, policy={"donation": True})
    agent.start()
    with agent.attach(donate=True) as invited:
        token = invited.message.token
        for wrong in ("", token[:-1], "\ud800", token + "0"):
            with pytest.raises(PermissionRefused), donation(agent, wrong):
                pass
        with donation(agent, token):
            with pytest.raises(ProtocolError, match="used before"), donation(agent, token):
                pass
            assert agent.status().state == "loading"
    with pytest.raises(PermissionRefused), donation(agent, token):
        pass


def test_the_source_must_fit_the_token(agent: Agent) -> None:
    agent.start()
    with (
        agent.attach(donate=True) as invited,
        Conversation(agent.paths.publish) as conversation,
        pytest.raises(PermissionRefused),
    ):
        conversation.request(protocol.Begin("loader", "g", invited.message.token), protocol.Accepted)


def test_a_second_set_of_one_role_is_refused(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    with agent.attach(donate=True) as invited, donation(agent, invited.message.token) as conversation:
        test_loader.publish(conversation, test_loader.make(fingerprint()))
        with pytest.raises(ProtocolError, match="taken"):
            test_loader.publish(conversation, test_loader.make(fingerprint()))
    agent.await_fds(before)
    assert agent.status().state == "empty"


def test_descriptors_with_the_wrong_message_are_closed(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    with agent.attach(donate=True) as invited, donation(agent, invited.message.token) as conversation:
        made = test_loader.make(fingerprint())
        conversation.send(protocol.Commit(1), made.fds)
        transport.close_all(made.fds)
        with pytest.raises(ProtocolError, match="wrong message"):
            conversation.receive()
    agent.await_fds(before)


def test_a_new_set_replaces_an_old_one_when_its_leases_end(agent: Agent) -> None:
    agent.configure(model=None)
    agent.start()
    with agent.attach(donate=True) as first:
        _donate(agent, first.message.token)
        [old] = agent.status().sets
        assert (old.version, len(old.leases)) == (1, 1)
        with (
            agent.attach(fingerprint(role="draft-1"), donate=True) as second,
            donation(agent, second.message.token) as conversation,
        ):
            for role in ("target", "draft-1"):
                test_loader.publish(conversation, test_loader.make(fingerprint(role=role), seed=7))
            conversation.request(protocol.Commit(2), protocol.Committed)
        assert [(s.role, s.version) for s in agent.status().sets] == [("target", 1), ("target", 2), ("draft-1", 1)]
        with agent.attach() as third:
            assert third.message.set_id != old.id
    eventually(lambda: [s.version for s in agent.status().sets if s.role == "target"] == [2])


def _donate(agent: Agent, token: str) -> None:
    with donation(agent, token) as conversation:
        test_loader.publish(conversation, test_loader.make(fingerprint()))
        conversation.request(protocol.Commit(1), protocol.Committed)
