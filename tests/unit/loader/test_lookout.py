"""A host that loads nothing finds out that another one waits for it; nobody can tell it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.loader.nodes import SECONDS, alive, eventually, free_port
from tests.unit.loader.test_meeting import GARBAGE, NODES, Meeter, hello
from weightcache.errors import UsageError
from weightcache.loader import __main__ as program, beacon, gathering
from weightcache.loader.beacon import Beacon, look
from weightcache.loader.lookout import waiting
from weightcache.loader.wire import Waiting

HERS = (*NODES[:2], "127.0.0.9")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def meeters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Meeter]]:
    monkeypatch.setattr(gathering, "RETRY_SECONDS", 0.05)
    started: list[Meeter] = []
    yield started
    for meeter in started:
        meeter.end()
        if meeter.meeting:
            meeter.meeting.close()


def seen(nodes: tuple[str, ...], node: int, port: int) -> Waiting:
    """What a node says, once it says anything."""
    found: list[Waiting] = []

    def looked() -> bool:
        if answer := look(nodes, node, port):
            found.append(answer)
        return bool(found)

    eventually(looked)
    return found[0]


def test_the_first_node_says_that_it_waits(
    meeters: list[Meeter], port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look(NODES, 0, port) is None
    meeters.append(Meeter(hello(0, NODES), port))
    assert seen(NODES, 0, port) == Waiting(together=True)
    assert seen(HERS, 0, port) == Waiting(together=False)
    meeters.extend(Meeter(hello(node, NODES), port) for node in (1, 2))
    assert {meeter.met().group for meeter in meeters} == {"group-0"}
    assert look(NODES, 0, port) is None
    assert "dropped" not in capsys.readouterr().err


def test_a_node_that_waits_for_the_first_one_says_so(meeters: list[Meeter], port: int) -> None:
    meeters.append(Meeter(hello(2, NODES), port))
    assert seen(NODES, 2, port) == Waiting(together=True)
    assert look(NODES, 1, port) is None
    meeters.extend(Meeter(hello(node, NODES), port) for node in (0, 1))
    assert {meeter.met().group for meeter in meeters} == {"group-0"}
    assert look(NODES, 2, port) is None, "it does not wait any more"


def test_who_asks_many_nodes_hears_of_those_that_wait(meeters: list[Meeter], port: int) -> None:
    meeters.append(Meeter(hello(2, NODES), port, 1.0))
    seen(NODES, 2, port)
    assert list(waiting(NODES, range(1, 3), port)) == [(2, True)]
    assert list(waiting(HERS, range(1, 2), port)) == []


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_does_not_keep_a_beacon_from_its_work(port: int, kind: str) -> None:
    with Beacon(hello(1), port):
        with socket.create_connection((NODES[1], port)) as sock:
            sock.sendall(GARBAGE[kind])
            sock.settimeout(SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        assert look(NODES[:2], 1, port) == Waiting(together=True)
    assert look(NODES[:2], 1, port) is None


def test_silence_keeps_nobody_for_long(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Beacon(hello(1), port), socket.create_connection((NODES[1], port)):
        started = time.monotonic()
        eventually(lambda: look(NODES[:2], 1, port))
        assert time.monotonic() - started < 3 * beacon.LOOK_SECONDS
    with socket.create_server((NODES[0], port)):
        monkeypatch.setattr(beacon, "LOOK_SECONDS", 0.2)
        assert look(NODES, 0, port) is None


@pytest.mark.parametrize("answer", [*(data for kind, data in GARBAGE.items() if kind != "waiting"), b""])
def test_what_is_no_answer_is_none(port: int, answer: bytes) -> None:
    with socket.create_server((NODES[0], port)) as listener:
        found: list[object] = []
        meeter = Looker(port, found)
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(answer)
        meeter.join(SECONDS)
        assert found == [None]


class Looker:
    """``look`` at the first node, in a thread."""

    def __init__(self, port: int, found: list[object]) -> None:
        self._thread = threading.Thread(target=lambda: found.append(look(NODES, 0, port)))
        self._thread.start()
        self.join = self._thread.join


def test_an_address_of_somebody_else_is_no_beacon(port: int) -> None:
    nodes = ("127.0.0.1", "192.0.2.1")
    with Beacon(hello(1, nodes), port):
        assert look(("127.0.0.1", "127.0.0.1"), 1, port) is None


def lookout(node: int, nodes: Sequence[str], port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weightcache.loader", "lookout", "--node", str(node)]
    command += ["--nodes", ",".join(nodes), "--meet-port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_lookout_ends_when_a_load_waits(meeters: list[Meeter], port: int, waits: int) -> None:
    with lookout(1 - waits, NODES[:2], port) as process:
        try:
            meeters.append(Meeter(hello(waits), port))
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert json.loads(said) == {"waiting": waits}
    assert process.returncode == 0
    meeters.append(Meeter(hello(1 - waits), port))


def test_a_load_of_other_nodes_is_none_of_its_business(meeters: list[Meeter], port: int) -> None:
    with lookout(1, HERS, port) as process:
        try:
            meeters.append(Meeter(hello(0), port))
            assert process.stderr is not None
            said = process.stderr.readline()
            assert "node 0 (127.0.0.1) waits with a load of other nodes than 127.0.0.1,127.0.0.2,127.0.0.9" in said
            assert alive(process.pid)
        finally:
            process.kill()
    meeters.append(Meeter(hello(1), port))


@pytest.mark.parametrize(
    "wrong",
    [("2", "a,b", "29600"), ("0", "a", "29600"), ("-1", "a,b", "29600"), ("0", "a,b", "0"), ("0", "a,b", "65535")],
)
def test_a_lookout_that_makes_no_sense(wrong: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    node, nodes, port = wrong
    assert program.main(["lookout", f"--node={node}", "--nodes", nodes, "--meet-port", port]) == UsageError.exit_status
    assert "cannot look out" in capsys.readouterr().err
