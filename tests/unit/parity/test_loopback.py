"""A server on loopback that is asked with its key."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from weightcache.parity.loopback import FAILURES, HOST, Client


class Server(http.server.BaseHTTPRequestHandler):
    """Answers who has the key with what it was sent; refuses /refused, and answers /slow when the test is over."""

    key = ""
    over: threading.Event

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/slow":
            self.over.wait(30)
        known = self.headers["Authorization"] == f"Bearer {self.key}" and self.path != "/refused"
        answer = f"{self.command} {self.path} {sent.decode()}".encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    kind = type("Keyed", (Server,), {"key": client.key, "over": (over := threading.Event())})
    with http.server.ThreadingHTTPServer((HOST, client.port), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield client
        over.set()
        server.shutdown()
        thread.join(5)


def test_it_is_asked_with_its_key(client: Client) -> None:
    assert client.answers()
    assert client.ask("GET", "/a", seconds=5.0) == b"GET /a "
    assert client.ask("POST", "/b", {"c": [1]}, seconds=5.0) == b'POST /b {"c": [1]}'
    client.key = "another"
    assert not client.answers()


def test_another_status_is_an_error_that_says_what_came(client: Client) -> None:
    with pytest.raises(ValueError, match="/refused answered 401: GET /refused"):
        client.ask("GET", "/refused", seconds=5.0)


def test_nobody_is_waited_for_longer(client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.ask("GET", "/slow", seconds=0.1)


def test_without_a_server_there_is_no_answer() -> None:
    client = Client()
    assert not client.answers()
    with pytest.raises(FAILURES):
        client.ask("GET", "/a", seconds=1.0)
