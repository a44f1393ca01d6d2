"""`wcache status` over the nodes of a deployment: what their exporters answer, and whatever else answers there."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from weightcache import nodes, status as states
from weightcache.monitor import brief
from weightcache.monitor.view import RankView
from weightcache.protocol import RankReport

GOOD = {"rank": 1, "state": "ready", "backend": "host", "gpu_uuid": "", "model": "/m"}


class Node:
    """Something that listens at 127.0.0.2, as another node; all of them have the port of the first one."""

    def __init__(self, port: int, talk: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.2", port))
        self.port = self.listener.getsockname()[1]
        self._talk = talk
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    connection.recv(10_000)
                    self._talk(connection)
        except OSError:
            return


def answering(body: bytes, status: str = "200 OK") -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


@pytest.fixture
def other(host, monkeypatch) -> Iterator[Callable[..., None]]:
    """Make another node; this host is node 0."""
    monkeypatch.setenv(nodes.VARIABLE, "0")
    made: list[Node] = []

    def make(talk: Callable[[socket.socket], None]) -> None:
        made.append(Node(0, talk))
        host.config.write_text(
            f'[memory]\nbackend = "host"\n[exporter]\nlisten = "127.0.0.1:{made[-1].port}"\n'
            '[deployment]\ntp_size = 2\nnodes = ["127.0.0.1", "127.0.0.2"]\n'
        )

    yield make
    for node in made:
        node.listener.close()


def told(*ranks: object, schema: object = 1) -> bytes:
    return json.dumps({"schema": schema, "ranks": ranks}).encode()


def view(status: states.RankStatus) -> RankView:
    return RankView(status, "up", None, time.time())


def test_a_section_for_each_node(host, other, make_status, make_set):
    failed = make_status(1, "failed")
    other(answering(brief.encode([view(failed)])))
    host.agent(0, RankReport(make_status(0)))
    got = host.wcache("status")
    assert (got.status, got.err) == (0, "")
    lines = got.out.splitlines()
    assert lines[0] == "node 0 (127.0.0.1, this host):"
    begin = lines.index("node 1 (127.0.0.2):")
    assert lines[begin - 1] == ""
    assert lines[begin + 2].split() == ["1", "failed", "host", "-", "/models/small", "0", "0", "GB"]
    # Why is for whoever is on that host: the sentence may end with a loader's output.
    assert lines[begin + 3] == "rank 1: failed [load-failed]"
    assert "killed by signal" not in got.out
    data = json.loads(host.wcache("status", "--json").out)
    assert [rank["rank"] for rank in data["ranks"]] == [0]
    (node,) = data["nodes"]
    assert (node["node"], node["address"], node["ranks"][0]["error"]["code"]) == (1, "127.0.0.2", "load-failed")
    assert "nodes" not in json.loads(host.wcache("status", "--rank", "0", "--json").out)


def test_a_single_node_asks_nobody(host, make_status):
    host.agent(0, RankReport(make_status(0)))
    assert "nodes" not in json.loads(host.wcache("status", "--json").out)
    assert "node" not in host.wcache("status").out.splitlines()[0]


def test_a_node_that_does_not_answer(host, other, make_status):
    other(answering(b""))
    port = int(host.config.read_text().partition("127.0.0.1:")[2].partition('"')[0])
    text = host.config.read_text().replace('"127.0.0.2"', '"127.0.0.3"')
    host.config.write_text(text)
    host.agent(0, RankReport(make_status(0)))
    got = host.wcache("status")
    assert got.status == 0
    expected = (
        f"node 1 (127.0.0.3): no answer from http://127.0.0.3:{port}/status (Connection refused): "
        f'is weightcache-exporter running there, with [exporter] listen = "0.0.0.0:{port}"?'
    )
    assert got.out.splitlines()[-1] == expected
    assert "Connection refused" in json.loads(host.wcache("status", "--json").out)["nodes"][0]["error"]


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(100):
        connection.sendall(b" ")
        time.sleep(0.1)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"[" * 65536)


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (lambda _: time.sleep(5), "(not in time)"),
        (drip, "(not in time)"),
        (endless, "too long"),
        (answering(b"no", "404 Not Found"), "HTTP status 404"),
        (lambda connection: connection.sendall(b"SSH-2.0-x\r\n"), "does not answer as an exporter"),
        (lambda _: None, "no answer from"),
        (answering(b"[" * 100_000), "does not answer as an exporter"),
        (answering(told(GOOD, schema=2)), "another version of weightcache (schema 2, here 1)"),
        (answering(told(GOOD, schema="1")), "expected a whole number"),
        (answering(told({**GOOD, "command": "x"})), "unknown field 'command'"),
        (answering(told({**GOOD, "x" * 10_000: 1})), "unknown field 'xxx"),
        (lambda connection: connection.sendall(b"x" * 60_000 + b"\r\n\r\n"), "does not answer as an exporter"),
        (answering(told({**GOOD, "rank": 10**400})), "a number is too large"),
        (answering(told({**GOOD, "rank": -1})), "no such number"),
        (answering(told({"rank": 1})), "is missing"),
        (answering(b"\xff\x1b[2J"), "does not answer as an exporter"),
    ],
)
def test_whatever_answers_there_is_one_line_in_time(host, other, make_status, talk, says):
    other(talk)
    host.agent(0, RankReport(make_status(0)))
    began = time.monotonic()
    got = host.wcache("status")
    assert time.monotonic() - began < 4.5
    assert got.status == 0
    line = got.out.splitlines()[-1]
    assert line.startswith("node 1 (127.0.0.2): ")
    assert says in line
    assert line.isprintable()
    assert len(line) < 500


def test_texts_of_strangers_are_escaped(host, other, make_status):
    hostile = {**GOOD, "state": "\x1b[31mready", "model": "\n\x07", "error": {"code": "\r", "message": "\x1b]0;x"}}
    other(answering(told(hostile)))
    host.agent(0, RankReport(make_status(0)))
    out = host.wcache("status").out
    assert all(line.isprintable() for line in out.splitlines())


def test_what_is_told_names_no_process_and_no_user(make_status, make_set, make_lease):
    status = make_status(sets=(make_set(leases=(make_lease(),)),), orphans=(make_lease(pid=99),), state="loading")
    body = brief.encode([view(status)])
    (rank,) = brief.decode(body)
    assert (rank.rank, rank.state, rank.sets[0].id) == (0, "loading", "s1abcd")
    assert rank.sets[0].fingerprint == status.sets[0].fingerprint.digest()
    for secret in (b"4711", b"sglang", b'"uid', b'"pid', b"launch_server", b"command"):
        assert secret not in body
