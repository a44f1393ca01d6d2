"""The engine's server listens on the launcher's socket: with the real uvicorn, and a launcher of a few lines."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import uvicorn

from weightcache import transport
from weightcache.engine import adapter_server, listener
from weightcache.engine.directive import Directive, ListenerWanted, decode_report
from weightcache.errors import AgentUnavailable, ProtocolError

SECONDS = 20.0


class Launcher:
    """Answers one connection with what ``gives`` returns."""

    def __init__(self, path: Path, gives: Callable[[], list[int]]) -> None:
        self.gives = gives
        self.asked: list[Any] = []
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.bind(str(path))
        self.sock.listen()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        connection, _ = self.sock.accept()
        with connection:
            self.asked.append(decode_report(transport.receive_packet(connection).data))
            transport.send_packet(connection, b"{}", self.gives())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(SECONDS)
        self.sock.close()


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A socket that listens before any engine does."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


def directive(path: Path) -> Directive:
    return Directive("engine", "host", {}, "group", report=str(path), listener=True)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def engines_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType(adapter_server.HTTP_SERVER)
    module.app = app
    monkeypatch.setitem(sys.modules, adapter_server.HTTP_SERVER, module)
    return app


def ask(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: client.recv(4096), b""))


async def serve(server: uvicorn.Server, around: Any, during: Callable[[], Any]) -> Any:
    original = uvicorn.Server.startup
    server.startup = lambda sockets=None: around(original, server, sockets)  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(SECONDS):
            while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)
            return await asyncio.to_thread(during)
    finally:
        server.should_exit = True
        await task


def test_connections_that_waited_are_answered(
    tmp_path: Path, port: socket.socket, engines_app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = port.getsockname()
    waiting = socket.create_connection(address, SECONDS)  # before there is an engine
    waiting.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    server = uvicorn.Server(
        uvicorn.Config(engines_app, host="127.0.0.1", port=address[1], lifespan="off", log_config=None)
    )

    def during() -> tuple[bytes, bytes]:
        with waiting:
            return b"".join(iter(lambda: waiting.recv(4096), b"")), ask(address)

    with Launcher(tmp_path / "report", lambda: [port.fileno()]) as launcher:
        first, second = asyncio.run(serve(server, listener.hook(directive(tmp_path / "report")), during))
    assert first.startswith(b"HTTP/1.1 200")
    assert second.endswith(b"ok")
    assert isinstance(launcher.asked[0], ListenerWanted)
    assert f"Uvicorn running on http://127.0.0.1:{address[1]}" in caplog.text.replace("%s://%s:%d", "")
    # The engine is gone, and its port is not.
    with socket.create_connection(address, SECONDS):
        pass


def test_other_servers_bind_their_own(tmp_path: Path, engines_app: Any) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(other, host="127.0.0.1", port=0, lifespan="off", log_config=None))
    around = listener.hook(directive(tmp_path / "nobody"))
    asyncio.run(serve(server, around, lambda: ask(server.servers[0].sockets[0].getsockname())))


def test_sockets_that_were_given_are_taken(tmp_path: Path, port: socket.socket, engines_app: Any) -> None:
    given: list[Any] = []

    async def original(_: Any, sockets: Any) -> None:
        given.extend(sockets)

    server: Any = SimpleNamespace(config=SimpleNamespace(app=engines_app))
    asyncio.run(listener.hook(directive(tmp_path / "nobody"))(original, server, [port]))
    assert given == [port]


def test_a_launcher_that_gives_nothing(tmp_path: Path) -> None:
    with Launcher(tmp_path / "report", list), pytest.raises(ProtocolError, match="gave no socket"):
        listener.given(directive(tmp_path / "report"))


def test_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ANSWER_SECONDS", 0.2)
    with pytest.raises(AgentUnavailable):
        listener.given(directive(tmp_path / "nobody"))
