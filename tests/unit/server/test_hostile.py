"""Clients that are silent, greedy, broken or malicious: nobody else notices, and nothing is leaked."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import weightcache
from tests.support.test_loader import fingerprint
from tests.unit.server.harness import LOADER, PYTHON, Agent, eventually, outcome
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import NotReady, ProtocolError, VersionSkew, WeightcacheError
from weightcache.server.acceptor import MOST_REFUSED, PER_UID
from weightcache.server.connection import Connection, Door
from weightcache.server.peers import Peer

HELLO = protocol.Hello("test", "1")
NOBODY = 65534


@contextmanager
def raw(path: Path) -> Iterator[Conversation]:
    """A connection for bytes that no honest client would send."""
    with Conversation(path) as conversation:
        yield conversation


def refused(conversation: Conversation) -> WeightcacheError:
    """The failure that the agent answers, after which it hangs up."""
    with pytest.raises(WeightcacheError) as caught:
        conversation.receive(2.0)
    with pytest.raises(WeightcacheError, match="closed the connection"):
        conversation.receive(2.0)
    return caught.value


GARBAGE = [
    b"\0\xff\xfe",
    b"{}",
    b"[]",
    b"1e999",
    b"[" * 100_000,
    b'{"protocol": 1, "fds": 0, "type": "hello"}',
    b'{"protocol": 1, "fds": 0, "type": ["hello"]}',
    b'{"protocol": 1, "fds": 3, "type": "hello", "program": "", "version": ""}',
    b'{"protocol": 1, "fds": 0, "type": "attach", "role": "", "group": "", "fingerprint": {}, "wait_seconds": 0}',
    b"x" * (transport.MAX_PACKET + 1000),
]


def test_garbage_is_refused_at_every_door(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    for data in GARBAGE:
        for path in (agent.paths.public, agent.paths.status, agent.paths.publish):
            with raw(path) as conversation:
                conversation.sock.send(data)
                assert isinstance(refused(conversation), ProtocolError)
    agent.await_fds(before)
    assert "Traceback" not in agent.text()


def test_another_protocol_version_is_its_own_error(agent: Agent) -> None:
    agent.start()
    with raw(agent.paths.public) as conversation:
        conversation.sock.send(json.dumps({"protocol": 2, "type": "hallo", "news": []}).encode())
        assert isinstance(refused(conversation), VersionSkew)


MISPLACED: list[tuple[str, protocol.Message]] = [
    ("public", protocol.Status()),
    ("public", protocol.Evict(None)),
    ("public", protocol.Begin("loader", "", "")),
    ("public", protocol.Welcome("", 0, "", "", "")),
    ("status", HELLO),
    ("status", protocol.Load(0.0)),
    ("status", protocol.Attach("target", "", fingerprint(), 0.0)),
    ("publish", protocol.Status()),
    ("publish", protocol.Commit(0)),
]


def test_a_message_at_the_wrong_door(agent: Agent) -> None:
    agent.start()
    for door, message in MISPLACED:
        with Conversation(getattr(agent.paths, door)) as conversation:
            conversation.send(message)
            error = refused(conversation)
        assert isinstance(error, ProtocolError)
        assert f"on the {door} socket" in str(error)
    assert agent.status().state == "empty"


def test_descriptors_cannot_be_pushed(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    pipe = os.pipe()
    for path in (agent.paths.public, agent.paths.status, agent.paths.publish):
        for announced in (0, 20):
            with raw(path) as conversation:
                transport.send_packet(conversation.sock, protocol.encode(HELLO, announced), pipe * 10)
                if path == agent.paths.public and not announced:
                    assert isinstance(conversation.receive()[0], protocol.Welcome)
                else:
                    refused(conversation)
    transport.close_all(pipe)
    agent.await_fds(before)


def test_silent_clients_delay_nobody(agent: Agent) -> None:
    agent.start()
    with ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(Conversation(agent.paths.public))
            silent.enter_context(Conversation(agent.paths.publish))
        started = time.monotonic()
        agent.load()
        with agent.attach() as held:
            assert isinstance(held.message, protocol.Attached)
        assert time.monotonic() - started < 5


def test_a_silent_client_is_told_and_dropped() -> None:
    async def wait() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            connection = Connection(ours, Peer(0, 0, 0), Door.PUBLIC)
            with pytest.raises(ProtocolError, match=r"no request within 0\.05 s"):
                await connection.receive(seconds=0.05)

    asyncio.run(wait())


def test_too_many_connections_of_one_user(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    with ExitStack() as many:
        for _ in range(PER_UID):
            many.enter_context(Conversation(agent.paths.public))
        one_more = many.enter_context(Conversation(agent.paths.public))
        with pytest.raises(NotReady, match=f"uid {os.getuid()} has {PER_UID} connections"):
            one_more.receive()
        assert agent.status().state == "empty"  # the other doors count for themselves
    agent.await_fds(before)
    agent.load()


def test_a_client_beyond_the_limit_is_told_so_whenever_it_asks(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    with ExitStack() as many:
        for _ in range(PER_UID):
            many.enter_context(Conversation(agent.paths.public))
        for at in range(100):  # most of them ask before, or while, the agent accepts
            with raw(agent.paths.public) as one_more:
                if at % 10 == 0:
                    assert one_more.readable(2.0)
                one_more.send(protocol.Attach("target", "g", fingerprint(), 0.0))
                assert isinstance(refused(one_more), NotReady)
    agent.await_fds(before)


def test_who_is_refused_and_stays_takes_no_descriptors(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    with ExitStack() as many:
        for _ in range(PER_UID):
            many.enter_context(Conversation(agent.paths.public))
        full = eventually(lambda: found if (found := agent.fds()) >= before + PER_UID else 0)
        for _ in range(5 * MOST_REFUSED):
            many.enter_context(Conversation(agent.paths.public))
            assert len(list(Path(f"/proc/{agent.pid}/fd").iterdir())) <= full + MOST_REFUSED + 1
        agent.await_fds(full)  # although all of them are still there


def test_accepting_pauses_when_descriptors_run_out(agent: Agent) -> None:
    agent.start()
    before = agent.fds()
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (before + 10, before + 10))
    with ExitStack() as many:
        for _ in range(30):
            many.enter_context(Conversation(agent.paths.public))
        eventually(lambda: "pausing" in agent.text())
        ticks = cpu_ticks(agent.pid)
        time.sleep(0.5)  # how busy it is can only be seen over time
        assert cpu_ticks(agent.pid) - ticks < 10
    eventually(lambda: _answers(agent))
    assert agent.fds() == before


def test_without_a_descriptor_for_it_an_engine_keeps_its_lease(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    agent.fds()
    _, most = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{agent.pid}/fd").iterdir()}
    free = next(number for number in range(most) if number not in used)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (free + 1, most))  # the connection, and nothing more
    with agent.attach() as engine:
        eventually(lambda: "is watched by its connection alone" in agent.text())
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (most, most))
        assert [lease.lease for lease in agent.status().sets[0].leases] == [engine.message.lease]
        pidfds = Path(f"/proc/{agent.pid}/fd")
        eventually(lambda: any("pidfd" in str(path.readlink()) for path in pidfds.iterdir()), what="not looked again")
        assert [lease.lease for lease in agent.status().sets[0].leases] == [engine.message.lease]
    eventually(lambda: not agent.status().sets[0].leases)


def test_a_client_adds_no_line_to_the_log(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    forged = "x\nrank 0: state failed: forged"
    agent.renew(forged).close()
    eventually(lambda: "lease on set" in agent.text())
    wanted = fingerprint(role=forged[:30])
    with agent.public() as conversation, pytest.raises(WeightcacheError):
        conversation.request(protocol.Attach(wanted.role, "g", wanted, 0.0), protocol.Attached)
    with agent.attach() as held:
        held.conversation.send(protocol.Faulted(forged))
        eventually(lambda: "is suspect" in agent.text())
    eventually(lambda: " verified: " in agent.text())
    assert agent.text().count("\\nrank 0: st") == 3
    lines = agent.text().splitlines()
    assert all(line.startswith("rank 0: ") and not line.startswith("rank 0: state failed") for line in lines)


def cpu_ticks(pid: int) -> int:
    return sum(int(n) for n in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])


def _answers(agent: Agent) -> bool:
    with agent.public() as conversation:
        return isinstance(conversation.request(HELLO, protocol.Welcome), protocol.Welcome)


def test_engines_that_never_read_do_not_block_the_agent(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    before = agent.fds()
    with ExitStack() as greedy:
        for _ in range(20):
            conversation = greedy.enter_context(Conversation(agent.paths.public))
            conversation.send(protocol.Attach("target", "g", fingerprint(), 0.0))
        eventually(lambda: len(agent.status().sets[0].leases) == 20)
        with agent.attach() as held:
            assert len(held.fds) == 3
    agent.await_fds(before)


@pytest.mark.skipif(os.getuid() != 0, reason="needs an agent of another user: root has no limit in flight")
def test_too_many_descriptors_in_flight(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.client.trusted_uids", lambda: frozenset({NOBODY}))
    copy = agent.folder / "named"
    shutil.copytree(
        Path(weightcache.__file__).parent, copy / "weightcache", ignore=shutil.ignore_patterns("__pycache__")
    )
    loader = shutil.copy(LOADER, agent.folder / "loader.py")
    agent.named = copy
    agent.configure({"WCTEST_ARENAS": ",".join(["4096"] * 20)}, loader={"command": [PYTHON, str(loader)]})
    agent.folder.chmod(0o755)
    agent.paths.directory.mkdir()
    for path in (agent.paths.directory, agent.gates):
        os.chown(path, NOBODY, NOBODY)
    agent.start("--load", user=NOBODY, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    agent.await_state("ready")
    with ExitStack() as greedy:
        for _ in range(4):
            conversation = greedy.enter_context(Conversation(agent.paths.public))
            conversation.send(protocol.Attach("target", "g", fingerprint(), 0.0))
        eventually(lambda: len(agent.status().sets[0].leases) == 4)
        with Conversation(agent.paths.public) as victim:
            victim.send(protocol.Attach("target", "g", fingerprint(), 0.0))
            eventually(lambda: len(agent.status().sets[0].leases) == 5)
            with pytest.raises(WeightcacheError, match="did not answer"):
                victim.receive(0.3, transport.MAX_FDS)
            started = time.monotonic()
            assert agent.status().state == "ready"
            assert time.monotonic() - started < 1
            greedy.close()
            message, fds = outcome(victim)
            assert isinstance(message, protocol.Attached)
            assert len(fds) == 21
            transport.close_all(fds)
