"""Nodes that find each other: who is let in, who is refused and with which words, who is dropped without any."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.loader.nodes import SECONDS, free_port, strangers
from weightcache.errors import LoadFailed, ProtocolError
from weightcache.loader import facts, gathering, wire
from weightcache.loader.facts import Facts
from weightcache.loader.gathering import ADVICE, meet
from weightcache.loader.meeting import Meeting
from weightcache.loader.wire import Failed, Finished, Hello, Welcome, Wire

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
FACTS = Facts("0.1.0", "0.5.23", "2.11.0", "3.11.2", ("--model-path", "/models/m", "--dtype", "bfloat16"))


def hello(node: int, nodes: tuple[str, ...] = NODES[:2], **changes: Any) -> Hello:
    ranks = (2 * node, 2 * node + 1)
    return replace(Hello(node, nodes, ranks, f"group-{node}", FACTS), **changes)


class Meeter:
    """``meet`` in a thread."""

    def __init__(self, me: Hello, port: int, seconds: float = SECONDS) -> None:
        self.meeting: Meeting | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(me, port, seconds))
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        try:
            self.meeting = meet(*arguments)
        except BaseException as error:
            self.failure = error

    def waits(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> str:
        """Wait for the end; the sentence of a refusal."""
        self._thread.join(2 * SECONDS)
        assert not self.waits()
        if self.failure is None:
            return ""
        assert isinstance(self.failure, LoadFailed), self.failure
        return self.failure.message

    def met(self) -> Meeting:
        assert self.end() == ""
        assert self.meeting is not None
        return self.meeting


Start = Callable[..., Meeter]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the loader of a node; whatever it holds is closed in the end."""
    monkeypatch.setattr(gathering, "LATE_SECONDS", 0.3)
    monkeypatch.setattr(gathering, "RETRY_SECONDS", 0.05)
    started: list[Meeter] = []

    def start(me: Hello, seconds: float = SECONDS) -> Meeter:
        started.append(Meeter(me, port, seconds))
        return started[-1]

    yield start
    for meeter in started:
        meeter.end()
        if meeter.meeting:
            meeter.meeting.close()


def test_all_nodes_meet_and_have_the_first_ones_group(start: Start) -> None:
    others = [start(hello(node, NODES)) for node in (2, 1)]  # before there is anybody to connect to
    time.sleep(0.2)
    first = start(hello(0, NODES))
    assert {meeter.met().group for meeter in (first, *others)} == {"group-0"}
    assert first.met().address == NODES[0]


SKEW = {
    "weightcache": ({"facts": replace(FACTS, weightcache="0.0.9")}, "runs weightcache 0.0.9, ME 0.1.0"),
    "sglang": ({"facts": replace(FACTS, sglang="0.5.17")}, "runs SGLang 0.5.17, ME 0.5.23"),
    "torch": ({"facts": replace(FACTS, torch="2.9.0")}, "runs torch 2.9.0, ME 2.11.0"),
    "python": ({"facts": replace(FACTS, python="3.12.1")}, "runs Python 3.12.1, ME 3.11.2"),
    "value": (
        {"facts": replace(FACTS, arguments=("--model-path", "/models/m", "--dtype", "float16"))},
        "is configured with --dtype float16, ME with --dtype bfloat16",
    ),
    "absent": (
        {"facts": replace(FACTS, arguments=("--model-path", "/models/m"))},
        "is configured with no --dtype, ME with --dtype bfloat16",
    ),
    "more": (
        {"facts": replace(FACTS, arguments=(*FACTS.arguments, "--trust-remote-code"))},
        "is configured with --trust-remote-code, ME with no --trust-remote-code",
    ),
    "hostile": (
        {"facts": replace(FACTS, sglang="0.5\x1b[2J\n17")},
        r"runs SGLang 0.5\x1b[2J\n17, ME 0.5.23",
    ),
    "nodes": (
        {"nodes": ("127.0.0.1", "10.0.0.9")},
        "has the nodes 127.0.0.1, 10.0.0.9, ME has 127.0.0.1, 127.0.0.2",
    ),
    "ranks": ({"ranks": (2,)}, "has the ranks 2, ME has 2, 3"),
}


@pytest.mark.parametrize("kind", SKEW)
def test_a_node_that_differs_is_refused_on_all_nodes(start: Start, kind: str) -> None:
    changes, words = SKEW[kind]
    meeters = start(hello(0)), start(hello(1, **changes))
    said = [meeter.end() for meeter in meeters]
    assert said[0] == said[1]
    assert said[0].startswith("node 1 (127.0.0.2) " + words.replace("ME", "node 0 (127.0.0.1)")), said[0]


def test_a_node_that_comes_after_a_difference_was_found_is_told_too(start: Start) -> None:
    first = start(hello(0, NODES))
    skewed = start(hello(1, NODES, facts=replace(FACTS, sglang="0.5.17")))
    time.sleep(0.1)
    late = start(hello(2, NODES))
    assert len({meeter.end() for meeter in (first, skewed, late)}) == 1


def test_a_missing_node_is_named_with_its_ranks(start: Start) -> None:
    first, second = start(hello(0, NODES), 0.5), start(hello(1, NODES))
    assert first.end() == f"node 2 (127.0.0.3, ranks 4, 5) did not come within 0.5 s; {ADVICE}"
    assert second.end() == first.end()


def test_a_first_node_that_is_missing(start: Start, port: int) -> None:
    said = start(hello(1), 0.5).end()
    assert said == f"node 0 (127.0.0.1:{port}) could not be reached within 0.5 s: Connection refused; {ADVICE}"


def test_a_first_node_that_waits_for_others(start: Start, port: int) -> None:
    first, second = start(hello(0, NODES), 3), start(hello(1, NODES), 0.5)
    where = f"node 0 (127.0.0.1:{port})"
    assert second.end() == f"{where} could not be reached within 0.5 s: it is there, but others are missing; {ADVICE}"
    # The place of the one that gave up is free again.
    missing = "node 1 (127.0.0.2, ranks 2, 3), node 2 (127.0.0.3, ranks 4, 5)"
    assert first.end() == f"{missing} did not come within 3 s; {ADVICE}"


def test_no_address_to_listen_at(start: Start, port: int) -> None:
    nodes = ("192.0.2.1", "127.0.0.2")
    assert start(hello(0, nodes)).end().startswith(f"node 0 cannot listen at 192.0.2.1:{port}: ")
    with socket.create_server((NODES[0], port)):
        assert start(hello(0)).end().startswith(f"node 0 cannot listen at {NODES[0]}:{port}: ")


def packed(body: object, size: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    return struct.pack("!I", len(data) if size is None else size) + data


def said_hello(**changes: Any) -> bytes:
    from weightcache import records

    return packed({"protocol": 1, "type": "Hello", **records.to_plain(hello(1)), **changes})


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "huge": struct.pack("!I", 1 << 31),
    "no record": packed([]),
    "deep": struct.pack("!I", 20000) + b"[" * 20000,
    "protocol": said_hello(protocol=2),
    "type": packed({"protocol": 1, "type": "Other"}),
    "failed": packed({"protocol": 1, "type": "Failed", "reason": "I say so"}),
    "welcome": packed({"protocol": 1, "type": "Welcome", "group": "x"}),
    "waiting": packed({"protocol": 1, "type": "Waiting", "together": True}),
    "field": said_hello(more=1),
    "kind": said_hello(node="1"),
    "node 0": said_hello(node=0),
    "node 2": said_hello(node=2),
    "negative": said_hello(node=-1),
    "twice": said_hello() * 2,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_dropped(start: Start, port: int, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = start(hello(0))
    with strangers((NODES[0], port)) as (sock,):
        sock.sendall(GARBAGE[kind])
        sock.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""
        assert first.waits()
        assert start(hello(1)).met().group == first.met().group == "group-0"
    assert "dropped a connection from 127.0.0.1" in capsys.readouterr().err


def test_silence_and_half_a_message_hold_nobody_up(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gathering, "HELLO_SECONDS", 0.3)
    first = start(hello(0))
    with strangers(*[(NODES[0], port)] * 3) as socks:
        socks[0].sendall(said_hello()[:-1])
        started = time.monotonic()
        for sock in socks:
            sock.settimeout(SECONDS)
            assert sock.recv(1) == b""
        assert time.monotonic() - started < 2
        assert start(hello(1)).met().group == first.met().group
    assert capsys.readouterr().err.count("it did not say who it is within 0.3 s") == 3


def test_many_silent_connections_cost_the_oldest_its_place(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gathering, "STRANGERS", 4)
    monkeypatch.setattr(gathering, "COMPLAINTS", 3)
    first = start(hello(0))
    with strangers(*[(NODES[0], port)] * 12) as socks:
        for sock in socks[:8]:
            sock.settimeout(SECONDS)
            assert sock.recv(1) == b""
        assert start(hello(1)).met().group == first.met().group
    assert capsys.readouterr().err.count("dropped a connection") == 3


def test_a_second_loader_of_a_node_waits_until_the_first_is_gone(
    start: Start, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(hello(0, NODES))
    with strangers((NODES[0], port)) as (sock,):
        sock.sendall(packed(json.loads(said_hello(nodes=list(NODES))[4:])))
        time.sleep(0.2)
        again = start(hello(1, NODES))
        time.sleep(0.3)
        assert again.waits()
        assert "node 1 (127.0.0.2) is there already" in capsys.readouterr().err
    last = start(hello(2, NODES))
    assert {meeter.met().group for meeter in (first, again, last)} == {"group-0"}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400\r\n\r\n" * 9, packed({"protocol": 1, "type": "Finished"}), b""])
def test_somebody_else_at_the_first_nodes_port(start: Start, port: int, answer: bytes) -> None:
    with socket.create_server((NODES[0], port)) as listener:
        other = start(hello(1), 1.0)
        listener.settimeout(SECONDS)
        sock, _ = listener.accept()
        with sock:
            sock.recv(10000)
            sock.sendall(answer)
        listener.close()
        assert f"node 0 (127.0.0.1:{port}) could not be reached within 1 s: " in other.end()


@pytest.fixture
def three(start: Start) -> list[Meeting]:
    meeters = [start(hello(node, NODES)) for node in (0, 1, 2)]
    return [meeter.met() for meeter in meeters]


def test_a_reason_reaches_all_others(three: list[Meeting]) -> None:
    three[1].fail("40 GB are free, 80 are needed")
    for other in (three[0], three[2]):
        assert other.until(None, SECONDS) == "node 1 (127.0.0.2): 40 GB are free, 80 are needed"
    three[0].fail("not told again")
    assert three[0].until(None, 0.1) == ""


def test_the_first_nodes_reason(three: list[Meeting]) -> None:
    three[0].fail("no\nroom")
    for other in three[1:]:
        assert other.until(None, SECONDS) == r"node 0 (127.0.0.1): no\nroom"


@pytest.mark.parametrize("gone", [0, 1])
def test_a_connection_that_ends_is_a_reason(three: list[Meeting], gone: int) -> None:
    three[gone].close()
    for other in (meeting for meeting in three if meeting is not three[gone]):
        name = f"node {gone} ({NODES[gone]})"
        assert other.until(None, SECONDS) == f"the loader of {name} vanished (the connection was closed)"


def test_whoever_has_finished_may_go(three: list[Meeting]) -> None:
    three[1].finish()
    three[2].finish()
    started = time.monotonic()
    three[0].finish()
    assert time.monotonic() - started < 2


def test_the_first_node_passes_on_what_fails_after_it_has_finished(
    three: list[Meeting], capsys: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=three[0].finish)
    thread.start()
    three[1].fail("too late")
    assert three[2].until(None, SECONDS) == "node 1 (127.0.0.2): too late"
    thread.join(SECONDS)
    assert "this node's weights are published, but node 1 (127.0.0.2): too late" in capsys.readouterr().err


def test_the_first_node_does_not_wait_for_ever(three: list[Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.loader.meeting.LINGER_SECONDS", 0.2)
    three[0].finish()
    assert three[1].until(None, 0.2) == ""


def test_nonsense_in_the_middle_of_a_load(start: Start) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        meeting = Meeting(0, NODES[:2], "g", {1: _unix(ours)})
        theirs.sendall(packed({"protocol": 1, "type": "Welcome", "group": "x"}))
        assert meeting.until(None, SECONDS) == "node 1 (127.0.0.2) said Welcome in the middle of a load"


def _unix(sock: socket.socket) -> Wire:
    made = Wire.__new__(Wire)
    made.sock, made.address, made._buffer = sock, "x", b""
    return made


def test_a_host_that_dies_is_noticed_within_half_a_minute(start: Start) -> None:
    first, second = start(hello(0)), start(hello(1))
    for meeting in (first.met(), second.met()):
        (sock,) = (wire.sock for wire in meeting._wires.values())
        tcp = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in (
            "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT",
        )}  # fmt: skip
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert tcp["KEEPIDLE"] + tcp["KEEPINTVL"] * tcp["KEEPCNT"] <= 30
        assert tcp["USER_TIMEOUT"] <= 30_000


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["protocol", "type", "node", "reason"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_decoding_raises_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        wire.decode(data)


@pytest.mark.parametrize("message", [hello(1), Welcome("g"), Failed("why"), Finished()])
def test_messages_survive_in_pieces(message: wire.Message) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = _unix(ours), _unix(theirs)
        for _ in range(2):
            sender.send(message)
        got = []
        while len(got) < 2:
            got += receiver.receive(1.0)
        assert got == [message, message]
        sender.send(message)
        whole = theirs.recv(100_000)
        for index in range(len(whole)):
            ours.send(whole[index : index + 1])
            got += receiver.receive(1.0)
        assert got[2:] == [message]


def test_arguments_of_a_nodes_own_and_secrets_are_not_compared() -> None:
    kept = ["--model-path", "/m", "--lora-paths", "a", "b", "--dtype=float16"]
    own = ["--node-rank", "1", "--base-gpu-id=4", "--api-key", "secret", "--host", "10.0.0.1"]
    expected = ("--model-path", "/m", "--lora-paths", "a", "b", "--dtype", "float16")
    assert facts.gather([*kept, *own]).arguments == facts.gather([*own, *kept]).arguments == expected
