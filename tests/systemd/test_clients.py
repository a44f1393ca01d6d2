"""Clients that come early, say little or never listen; what the agent says of itself; an agent that hangs."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from tests.support import test_loader
from tests.systemd.machine import Machine
from tests.systemd.rank import CANARY, ONE_SET, Client, Rank, configuration, eventually
from tests.unit.server.harness import outcome
from weightcache import transport
from weightcache.client import Conversation
from weightcache.protocol import Attach, Attached, Progress

MANY = 30


@contextmanager
def asking(rank: Rank, count: int) -> Iterator[list[Conversation]]:
    """Clients that have asked for the weights and did not look for an answer yet."""
    wanted = test_loader.fingerprint()
    with ExitStack() as stack:
        clients = [stack.enter_context(Conversation(rank.paths.public)) for _ in range(count)]
        for client in clients:
            client.send(Attach("target", "g", wanted, 60.0))
        yield clients


def told(client: Conversation) -> str:
    """The phase that the client hears of next."""
    message, _ = client.receive(30.0)
    assert isinstance(message, Progress)
    return message.progress.phase


def served(clients: list[Conversation]) -> set[str]:
    """Wait until each client has its weights; the sets that they got."""
    found = set()
    for client in clients:
        message, fds = outcome(client)
        transport.close_all(fds)
        assert isinstance(message, Attached)
        assert len(fds) == 1 + len(test_loader.ARENAS)
        found.add(message.set_id)
    return found


def test_many_clients_before_and_during_the_load_get_one_set(rank: Rank) -> None:
    rank.gate("loading")
    assert rank.show("ActiveState") == {"ActiveState": "inactive"}
    with asking(rank, MANY // 2) as early:
        rank.reached("loading")
        with asking(rank, MANY // 2) as late:
            assert {told(client) for client in late} == {"loading"}
            assert {told(client) for client in early} <= {"importing", "loading"}
            rank.open("loading")
            assert [served(early), served(late)] == [{set_id} for set_id in rank.ids()] * 2
            eventually(lambda: len(rank.status().sets[0].leases) == MANY)
    assert rank.count("load-began", "set-published") == (1, 1)
    assert rank.restarts == 0


def test_clients_that_wait_are_served_by_the_next_agent(rank: Rank) -> None:
    """Who was not accepted yet when the agent died is in the manager's queue."""
    before = rank.ready()
    rank.machine.kill(before.pid, signal.SIGSTOP)
    with asking(rank, MANY) as clients:
        rank.kill()
        assert served(clients) == {before.sets[0].id}
    assert rank.count("load-began", "set-adopted") == (1, 1)


def test_who_says_nothing_starts_an_agent_and_no_load(rank: Rank) -> None:
    with Conversation(rank.paths.public):
        rank.successor(0)
        assert rank.status_text == "empty"
        assert rank.count("load-began") == (0,)
        # It stands in nobody's way.
        with Client(rank) as client:
            client.unharmed()
    assert rank.count("load-began") == (1,)


def test_who_never_reads_its_answer_stands_in_nobodys_way(rank: Rank) -> None:
    rank.gate("loading")
    with asking(rank, 1):
        rank.reached("loading")
        with asking(rank, 1) as others:
            rank.open("loading")
            served(others)
        eventually(lambda: len(rank.status().sets[0].leases) == 1)
    eventually(lambda: not rank.status().sets[0].leases)


def test_whoever_sends_nonsense_gets_an_answer_and_the_agent_lives(rank: Rank) -> None:
    before = rank.ready()
    for packet in (b"\0", b"{}", b'{"protocol": 99}'):
        with Conversation(rank.paths.public) as client:
            client.sock.send(packet)
            assert b'"failure"' in client.sock.recv(65536)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, pytest.raises(OSError, match="type"):
        other.connect(str(rank.paths.public))
    assert rank.status().pid == before.pid


# What the manager is told


def says(rank: Rank, beginning: str) -> bool:
    return rank.status_text.startswith(beginning)


def test_status_shows_phase_and_percent_of_a_load(rank: Rank) -> None:
    for gate in ("started", "loading", "complete"):
        rank.gate(gate)
    rank.begin()
    for gate, expected in (
        ("started", "loading: importing, "),
        ("loading", "loading: loading, 50 % of 0.0 GB"),
        ("complete", "loading: publishing, 100 % of 0.0 GB"),
    ):
        rank.reached(gate)
        eventually(partial(says, rank, expected), lambda: rank.status_text)
        rank.open(gate)
    rank.await_active()
    eventually(lambda: rank.status_text == "ready: a-model (0.0 GB), 0 engines", lambda: rank.status_text)


def test_a_load_may_take_longer_than_a_start_while_it_shows_life(agents: Machine, rank: Rank) -> None:
    rank.gate("loading")
    with agents.drop_in(rank.service, "[Service]\nTimeoutStartSec=2\n"):
        rank.begin()
        rank.reached("loading")
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 5.0)
        assert rank.show("ActiveState", "SubState") == {"ActiveState": "activating", "SubState": "start"}
        rank.open("loading")
        rank.await_active()
    assert rank.restarts == 0
    assert rank.count("load-began", "set-published") == (1, 1)


def test_a_load_that_hangs_is_given_up_in_words(rank: Rank) -> None:
    rank.write(configuration({"WCTEST_MODE": "hang"}, loader="stall_seconds = 3"))
    assert rank.machine.run("systemctl", "start", rank.service, check=False).returncode == 1
    rank.await_active()
    why = "failed: the loader made no progress for 3 s (phase loading): test loader starts --model-path m"
    assert rank.status_text == why
    assert rank.stored == CANARY
    rank.no_loader()


def test_an_agent_that_hangs_is_replaced_and_its_weights_are_kept(agents: Machine, rank: Rank) -> None:
    with agents.drop_in(rank.service, "[Service]\nWatchdogSec=1\n"):
        before = rank.ready()
        with Client(rank) as client:
            agents.kill(before.pid, signal.SIGSTOP)
            after = rank.successor(before.pid)
            assert [resident.id for resident in after.sets] == [client.set_id]
            assert rank.stored == ONE_SET
            eventually(client.leased)
            client.unharmed()
    assert any("Watchdog timeout" in message for message in agents.messages(rank.service, rank.since))
    assert rank.count("load-began", "set-adopted") == (1, 1)
