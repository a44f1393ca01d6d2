"""The private socket: who may connect, what is removed, and SGLang's own requests over it."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import requests

from weightcache.engine import private
from weightcache.errors import WeightcacheError

OWN = "http://127.0.0.1:30000"


def test_only_its_user_may_connect(runtime_dir: Path) -> None:
    path = runtime_dir / "http"
    before = os.umask(0)
    try:
        with private.listen(path) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not listener.get_inheritable()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        os.umask(before)


def test_what_a_dead_server_left_behind_is_replaced(runtime_dir: Path) -> None:
    private.listen(runtime_dir / "http").close()
    private.listen(runtime_dir / "http").close()


def test_a_socket_that_somebody_listens_on_is_left_alone(runtime_dir: Path) -> None:
    with private.listen(runtime_dir / "http"):
        with pytest.raises(WeightcacheError, match="another process listens at"):
            private.listen(runtime_dir / "http")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(runtime_dir / "http"))


def test_what_is_no_socket_is_left_alone(runtime_dir: Path) -> None:
    (runtime_dir / "http").write_text("mine")
    with pytest.raises(WeightcacheError, match="is no socket"):
        private.listen(runtime_dir / "http")
    assert (runtime_dir / "http").read_text() == "mine"


class Handler(BaseHTTPRequestHandler):
    """Says what was asked."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = {"path": self.path, "type": self.headers["Content-Type"], "key": self.headers["Authorization"]}
        answer = json.dumps(asked | {"body": json.loads(body or b"null")}).encode()
        self.send_response(404 if self.path == "/nothing" else 200)
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def module(runtime_dir: Path) -> Iterator[Any]:
    """SGLang's ``requests``, beside a server on the Unix socket."""
    path = runtime_dir / "http"

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

        def get_request(self) -> Any:
            return self.socket.accept()[0], ("", 0)

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield private.Requests(requests, OWN, path)
        server.shutdown()
        thread.join()


def test_what_is_asked_of_the_own_address_goes_over_the_socket(module: Any) -> None:
    response = module.post(
        f"{OWN}/generate", json={"text": "x"}, headers={"Authorization": "Bearer k"}, timeout=5, verify=True
    )
    assert response.status_code == 200
    assert response.json() == {
        "path": "/generate", "type": "application/json", "key": "Bearer k", "body": {"text": "x"}
    }  # fmt: skip
    assert module.get(f"{OWN}/model_info", timeout=5).json()["body"] is None


def test_answers_are_those_of_requests(module: Any) -> None:
    response = module.get(f"{OWN}/nothing")
    assert "/nothing" in response.text
    with pytest.raises(requests.exceptions.HTTPError, match="404"):
        response.raise_for_status()
    assert module.exceptions is requests.exceptions


@pytest.mark.parametrize("url", [f"{OWN}0/model_info", "http://127.0.0.1:1/model_info"])
def test_what_is_asked_of_others_does_not(module: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(requests, "get", lambda url, **kwargs: asked.append((url, kwargs)))
    module.get(url, params={"rank": 1}, timeout=5)
    assert asked == [(url, {"params": {"rank": 1}, "timeout": 5})]


def test_a_server_that_is_not_there_yet(runtime_dir: Path) -> None:
    module = private.Requests(requests, OWN, runtime_dir / "nobody")
    with pytest.raises(requests.exceptions.ConnectionError):
        module.get(f"{OWN}/model_info", timeout=1)


def test_a_server_that_does_not_answer(runtime_dir: Path) -> None:
    with private.listen(runtime_dir / "http"), pytest.raises(requests.exceptions.ReadTimeout):
        private.Requests(requests, OWN, runtime_dir / "http").get(f"{OWN}/model_info", timeout=0.1)
