"""Conversations: deadlines, impostors, and no descriptor left behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.contracts.test_transport import files, listener, no_leak, push
from weightcache import client, protocol, transport
from weightcache.client import Conversation
from weightcache.errors import AgentUnavailable, Drained, PermissionRefused, ProtocolError, VersionSkew
from weightcache.protocol import Hello, LoadProgress, Progress, Welcome, encode

WELCOME = Welcome("1", 0, "empty", "host", "")
Script = Callable[[socket.socket], None]


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Callable[[Script], Path]]:
    """Accept one connection and do something with it."""
    threads, servers = [], []

    def start(script: Script) -> Path:
        path = runtime_dir / f"{len(servers)}.sock"
        server = listener(path, 5)
        servers.append(server)

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                script(sock)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return path

    yield start
    for thread in threads:
        thread.join(5)
    for server in servers:
        server.close()


def null_files() -> int:
    """Open descriptors of /dev/null, which is what the tests push."""
    return sum(str(entry.resolve()) == "/dev/null" for entry in Path("/proc/self/fd").iterdir())


def expect_nothing(conversation: Conversation) -> None:
    """Raise what receiving raises, and ProtocolError for a message."""
    message, fds = conversation.receive(2, 10)
    transport.close_all(fds)
    raise ProtocolError(f"unexpected {message}")


def read(sock: socket.socket) -> None:
    sock.settimeout(5)
    transport.receive_packet(sock, 10).close()


def until_closed(sock: socket.socket) -> None:
    sock.settimeout(5)
    while transport.receive_packet(sock, 10).data:
        pass


def test_request_and_answer(serve: Callable[[Script], Path]) -> None:
    def script(sock: socket.socket) -> None:
        read(sock)
        for done in (1, 2):
            transport.send_packet(sock, encode(Progress(LoadProgress("loading", done, 2, 0.5))))
        transport.send_packet(sock, encode(WELCOME))

    seen: list[int] = []
    with Conversation(serve(script)) as conversation:
        answer = conversation.request(Hello("p", "v"), Welcome, on_progress=lambda p: seen.append(p.bytes_done))
    assert answer == WELCOME
    assert seen == [1, 2]


def test_a_silent_peer_ends_at_the_deadline(serve: Callable[[Script], Path]) -> None:
    with Conversation(serve(until_closed)) as conversation:
        started = time.monotonic()
        with pytest.raises(AgentUnavailable, match="did not answer within"):
            conversation.request(Hello("p", "v"), Welcome, timeout=0.3)
        assert 0.2 < time.monotonic() - started < 2


def test_progress_does_not_move_the_deadline(serve: Callable[[Script], Path]) -> None:
    def script(sock: socket.socket) -> None:
        for _ in range(40):
            try:
                transport.send_packet(sock, encode(Progress(LoadProgress("loading", 0, 0, 0.0))))
            except OSError:
                return
            time.sleep(0.05)

    with Conversation(serve(script)) as conversation:
        started = time.monotonic()
        with pytest.raises(AgentUnavailable):
            conversation.request(Hello("p", "v"), Welcome, timeout=0.3)
        assert time.monotonic() - started < 1.5


def test_a_peer_that_goes_away(serve: Callable[[Script], Path]) -> None:
    with (
        Conversation(serve(read)) as conversation,
        pytest.raises(AgentUnavailable, match=r"closed the connection|away"),
    ):
        conversation.request(Hello("p", "v"), Welcome)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"garbage", ProtocolError),
        (b'{"protocol": 2}', VersionSkew),
        (encode(protocol.failure(Drained("drained by root")), 3), Drained),
        (encode(protocol.Accepted(), 3), ProtocolError),
        (encode(WELCOME, 2), ProtocolError),
        (b"x" * (transport.MAX_PACKET + 100), ProtocolError),
    ],
    ids=["garbage", "skew", "failure", "unexpected", "fewer-announced", "oversized"],
)
def test_anything_else_is_an_error_that_leaves_nothing_open(
    serve: Callable[[Script], Path], data: bytes, error: type[Exception]
) -> None:
    def script(sock: socket.socket) -> None:
        read(sock)
        with files(3) as fds:
            push(sock, data, fds)
        until_closed(sock)

    path = serve(script)
    with Conversation(path) as conversation:
        before = null_files()
        conversation.send(Hello("p", "v"))
        with pytest.raises(error) as caught:
            expect_nothing(conversation)
        assert type(caught.value) is error
        time.sleep(0.05)
        assert null_files() == before


def test_an_impostor_is_refused(serve: Callable[[Script], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "trusted_uids", lambda: frozenset({4_000_000}))
    path = serve(until_closed)
    with pytest.raises(PermissionRefused, match="which is no agent's user"):
        Conversation(path)


def test_who_is_trusted() -> None:
    assert {0, os.geteuid()} <= client.trusted_uids()


def test_alive(serve: Callable[[Script], Path], runtime_dir: Path) -> None:
    assert client.alive(serve(until_closed))
    assert not client.alive(runtime_dir / "none")


def test_a_failed_connection_leaves_nothing(runtime_dir: Path) -> None:
    with no_leak(), pytest.raises(AgentUnavailable):
        Conversation(runtime_dir / "none", 0.2)
