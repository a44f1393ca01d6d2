"""Requests of engines, from real servers that answer well, badly, slowly, without an end, or not at all."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.unit.monitor.made import eventually
from weightcache.monitor import requests as module
from weightcache.monitor.requests import Address, Load, Requests, address

GOOD = {
    "timestamp": "2026",
    "version": "0.5.23",
    "loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1}],
}
Answer = Callable[[socket.socket], None]
Serve = Callable[[Answer], Address]
HALF_A_SECOND = module.TIMEOUT_SECONDS
SECONDS = 30.0
"""More than a busy machine needs for anything here."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests have longer: what is no answer is none for what it says, and what is one comes."""
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", SECONDS)


def ask(where: Address) -> Load | None:
    """The answer of one server, or None."""
    try:
        return module.ask(where)
    except Exception:
        return None


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server on a free port that reads a request and does ``answer`` with the connection."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(answer: Answer) -> Address:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        while b"\r\n\r\n" not in connection.recv(65536):
                            pass
                        answer(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return Address(*listener.getsockname())

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(5)


@pytest.fixture
def hung(serve: Serve) -> Iterator[Address]:
    """A server that says nothing as long as the test lasts."""
    over = threading.Event()
    yield serve(lambda _: over.wait(4 * SECONDS) and None)
    over.set()


def fastest(call: Callable[[], object], least: float = 0.0) -> float:
    """The seconds of the shortest of some calls: a machine that has other things to do delays some, not all."""
    took = []
    for _ in range(5):
        started = time.monotonic()
        call()
        took.append(time.monotonic() - started)
    assert min(took) >= least
    return min(took)


def response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def saying(data: bytes) -> Answer:
    return lambda connection: connection.sendall(data)


def loads(*entries: object) -> bytes:
    return response(json.dumps({"loads": list(entries)}).encode())


def test_an_answer(serve: Serve) -> None:
    assert ask(serve(saying(response(json.dumps(GOOD).encode())))) == Load(2, 1)


def test_data_parallel_ranks_are_added(serve: Serve) -> None:
    one = {"num_running_reqs": 2, "num_waiting_reqs": 0}
    assert ask(serve(saying(loads(one, {"num_running_reqs": 5, "num_waiting_reqs": 7, "more": [1]})))) == Load(7, 7)


def test_what_is_asked(serve: Serve) -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                seen.append(connection.recv(65536))

        thread = threading.Thread(target=run)
        thread.start()
        assert ask(Address(*listener.getsockname())) is None
        thread.join()
    first, *headers = seen[0].decode().split("\r\n")
    assert first == "GET /v1/loads?include=core HTTP/1.0"
    assert not [header for header in headers if header.lower().startswith("authorization")]


@pytest.mark.parametrize(
    "data",
    [
        response(b'{"error": "Unauthorized"}', "401 Unauthorized"),
        response(b"", "404 Not Found"),
        response(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n"),
        response(json.dumps(GOOD).encode(), "500 Oops"),
        b"",
        b"\0" * 100,
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        response(b"not json"),
        response(b"\xff\xfe"),
        response(b"[" * 60_000),
        response(b"[]"),
        response(b'{"loads": {}}'),
        response(b'{"loads": []}'),
        loads(1),
        loads({}),
        loads({"num_running_reqs": 1}),
        loads({"num_running_reqs": -1, "num_waiting_reqs": 0}),
        loads({"num_running_reqs": 1.5, "num_waiting_reqs": 0}),
        loads({"num_running_reqs": True, "num_waiting_reqs": 0}),
        loads({"num_running_reqs": "1", "num_waiting_reqs": 0}),
        loads({"num_running_reqs": 10**12, "num_waiting_reqs": 0}),
        response(b'{"loads": [{"num_running_reqs": ' + b"1" * 5000 + b', "num_waiting_reqs": 0}]}'),
        response(b" " * 2**20 + json.dumps(GOOD).encode()),
    ],
    ids=str,
)
def test_what_is_no_answer(serve: Serve, data: bytes) -> None:
    assert ask(serve(saying(data))) is None


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = Address(*listener.getsockname())
    assert ask(where) is None


@pytest.mark.parametrize(
    "trickle", [b"", b"H", response(json.dumps(GOOD).encode())[:-1]], ids=["silent", "drips", "short"]
)
def test_a_slow_server_has_half_a_second(serve: Serve, trickle: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(connection: socket.socket) -> None:
        ends = time.monotonic() + 1.2
        while time.monotonic() < ends:
            connection.sendall(trickle)
            time.sleep(0.1)

    monkeypatch.setattr(module, "TIMEOUT_SECONDS", HALF_A_SECOND)
    where = [serve(answer) for _ in range(5)]
    said: list[Load | None] = []
    assert fastest(lambda: said.append(ask(where.pop()))) < HALF_A_SECOND + 0.3
    assert said == [None] * 5


def test_a_server_without_an_end(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b" " * 65536)

    assert ask(serve(answer)) is None


def test_a_hung_server_delays_nobody(serve: Serve, hung: Address) -> None:
    may = threading.Event()
    good = serve(lambda connection: may.wait(SECONDS) and saying(response(json.dumps(GOOD).encode()))(connection))
    requests = Requests()
    said: list[dict[Address, Load | None]] = []
    assert fastest(lambda: said.append(requests.now([good, hung]))) < 0.2
    assert said == [{good: None, hung: None}] * 5
    may.set()
    eventually(lambda: requests.now([good, hung])[good] == Load(2, 1), SECONDS)
    assert requests.now([good, hung])[hung] is None


def test_first_answers_may_be_waited_for(serve: Serve, hung: Address) -> None:
    good = serve(saying(response(json.dumps(GOOD).encode())))
    requests = Requests()
    assert requests.now([good], SECONDS) == {good: Load(2, 1)}
    said: list[dict[Address, Load | None]] = []
    assert fastest(lambda: said.append(requests.now([good, hung], 0.2)), 0.2) < 0.4
    assert said == [{good: Load(2, 1), hung: None}] * 5
    assert requests.now([], 5) == {}


def test_a_server_is_asked_seldom_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Address] = []
    answers = [Load(1, 0), Load(2, 0)]
    where = Address("127.0.0.1", 1)
    requests = Requests(lambda server: asked.append(server) or answers[min(len(asked), 2) - 1])
    for _ in range(5):
        assert requests.now([where], 1) == {where: Load(1, 0)}
    assert len(asked) == 1
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.0)
    eventually(lambda: requests.now([where])[where] == Load(2, 0))
    requests.now([])
    assert requests._loads == {}
    assert requests._asked == {}


def test_a_question_that_breaks_is_no_answer() -> None:
    def fail(_: Address) -> Load:
        raise RuntimeError("a bug")

    where = Address("127.0.0.1", 1)
    assert Requests(fail).now([where], 1) == {where: None}


def test_not_too_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", 2)
    release = threading.Event()
    under_way: list[Address] = []

    def hang(server: Address) -> Load:
        under_way.append(server)
        release.wait(5)
        return Load(0, 0)

    requests = Requests(hang)
    servers = [Address("127.0.0.1", port) for port in range(1, 6)]
    requests.now(servers)
    requests.now(servers)
    eventually(lambda: len(under_way) == 2)
    assert len(under_way) == 2
    release.set()
    eventually(lambda: all(requests.now(servers).values()))


OTHER = next(
    (
        e.address
        for es in psutil.net_if_addrs().values()
        for e in es
        if e.family == socket.AF_INET and e.address != "127.0.0.1"
    ),
    None,
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ("127.0.0.1", 30000)),
        ("--port 30001", ("127.0.0.1", 30001)),
        ("--port=30001 --host=0.0.0.0", ("127.0.0.1", 30001)),
        ("--port 1 --port 2", ("127.0.0.1", 2)),
        ("--host localhost", ("127.0.0.1", 30000)),
        ("--host 127.0.0.2", ("127.0.0.2", 30000)),
        ("--host ::", ("::1", 30000)),
        ("--host ::1 --port 5", ("::1", 5)),
        ("--host [::1]", ("::1", 30000)),
        ("--config c.yaml --port 7", ("127.0.0.1", 7)),
        ("--host 192.0.2.1", None),
        ("--host 169.254.169.254", None),
        ("--host example.com", None),
        ("--host", ("127.0.0.1", 30000)),
        ("--port", None),
        ("--port x", None),
        ("--port 0", None),
        ("--port 70000", None),
        ("--port -1", None),
        ("--port 99999999999999999999", None),
        ("--port \N{ARABIC-INDIC DIGIT THREE}", None),
        ("--config c.yaml", None),
        ("--ssl-certfile c.pem", None),
    ],
)
def test_where_a_server_listens(arguments: str, expected: tuple[str, int] | None) -> None:
    command = ["python", "-m", "sglang.launch_server", "--model-path", "m", *arguments.split()]
    assert address(command) == expected


def test_an_unknown_command_line() -> None:
    assert address([]) is None


@pytest.mark.skipif(OTHER is None, reason="this host has only a loopback address")
def test_an_address_of_this_host() -> None:
    assert address(["s", "--host", str(OTHER)]) == (OTHER, 30000)
