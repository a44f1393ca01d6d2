"""A server in a slot, with the real uvicorn and a stand-in for SGLang: private, public by order, and retiring."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import uvicorn

from tests.support.agent import eventually
from tests.support.slot import MAIN, SlotLauncher
from tests.unit.engine.test_slot_channel import ends_threads_only
from weightcache.engine import adapter_kv, adapter_server, adapter_slot, slot_requests
from weightcache.engine.private import UnixConnection
from weightcache.engine.slot_server import SlotServer
from weightcache.standby.locks import is_taken
from weightcache.standby.messages import Accept, Ready, Slot

SECONDS = 20.0


class SGLang:
    """Its HTTP application and its tokenizer manager. ``/slow`` answers when it is told to, or aborted.

    ``/background`` answers at once, and what it began goes on in a task of its own.
    """

    def __init__(self) -> None:
        self.aborts = 0
        self.flushes = 0
        self.idle = True
        self.answers_flush = True
        self.server_status = "starting"
        self.running: dict[str, asyncio.Event] = {}
        self.rid_to_state: dict[str, object] = {}
        self.at_flush: list[int] = []
        """How many requests were known at each flush."""
        self.loop: Any = None
        self.app = self.answer  # one object: a bound method is made anew each time

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.loop = asyncio.get_running_loop()
        path = scope["path"]
        if path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        if path == "/background":
            self.rid_to_state["background"] = object()
        elif path != "/quick":
            await self._until_told(path)
        if path != "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"last"})

    async def _until_told(self, path: str) -> None:
        event = self.running[path] = asyncio.Event()
        try:
            await event.wait()
        finally:
            del self.running[path]

    def finish(self, path: str) -> None:
        eventually(lambda: path in self.running, SECONDS)
        self.loop.call_soon_threadsafe(self.running[path].set)

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all
        self.aborts += 1
        self.rid_to_state.clear()
        for path, event in self.running.items():
            if path != "/stuck":
                event.set()

    def auto_create_handle_loop(self) -> None:
        """There is one."""

    async def flush_cache_communicator(self, request: Any) -> list[Any]:
        """Two replicas' answers."""
        self.flushes += 1
        self.at_flush.append(len(self.rid_to_state))
        if not self.answers_flush:
            await asyncio.Event().wait()
        return [SimpleNamespace(success=True), SimpleNamespace(success=self.idle)]


@dataclass
class Here:
    """What a test has to do with."""

    sglang: SGLang
    launcher: SlotLauncher
    slot: Slot
    server: SlotServer
    port: socket.socket
    clients: list[Client] = field(default_factory=list)

    def ask(self, path: str, method: str = "GET") -> Client:
        client = Client(self.port.getsockname(), path, method)
        self.clients.append(client)
        return client

    def privately(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        with closing(UnixConnection(Path(self.slot.private), SECONDS)) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()

    def activate(self) -> None:
        assert self.launcher.elect().problem == ""
        assert self.launcher.accept(self.port).problem == ""


class Client:
    """A request in a thread, on a connection that stays open for the next one."""

    def __init__(self, address: tuple[str, int], path: str, method: str = "GET") -> None:
        self.status, self.body, self.headers = 0, b"", {}
        self.connection = http.client.HTTPConnection(*address, timeout=SECONDS)
        self.connection.connect()
        self.ask(path, method)

    def ask(self, path: str, method: str = "GET") -> None:
        self.thread = threading.Thread(target=self._ask, args=(path, method))
        self.thread.start()

    def _ask(self, path: str, method: str) -> None:
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            self.status = 0
            self.connection.request(method, path, b"x" if method == "POST" else None)
            response = self.connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            self.body, self.status = response.read(), response.status

    def result(self) -> tuple[int, bytes]:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.status, self.body


@pytest.fixture
def here(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    sglang = SGLang()
    module: Any = types.ModuleType(adapter_server.HTTP_SERVER)
    module.app, module.requests = sglang.app, requests
    module.ServerStatus = SimpleNamespace(Up="up")
    module._global_state = SimpleNamespace(tokenizer_manager=sglang)
    monkeypatch.setitem(sys.modules, adapter_server.HTTP_SERVER, module)
    messages: Any = types.ModuleType("sglang.srt.managers.io_struct")
    messages.FlushCacheReqInput = lambda timeout_s: timeout_s
    monkeypatch.setitem(sys.modules, messages.__name__, messages)
    slot = Slot(str(runtime_dir / "channel"), str(runtime_dir / "lock"), str(runtime_dir / "http"))
    with (
        ends_threads_only(monkeypatch),
        SlotLauncher(runtime_dir / "channel") as launcher,
        socket.create_server(("127.0.0.1", 0), backlog=64) as port,
    ):
        made = Here(sglang, launcher, slot, SlotServer(slot), port)
        launcher.wait_joined(MAIN)
        config = uvicorn.Config(
            sglang.app, port=port.getsockname()[1], lifespan="off", log_config=None, ws="none", interface="asgi3"
        )
        server = uvicorn.Server(config)
        original = uvicorn.Server.startup
        server.startup = lambda sockets=None: made.server.around_startup(original, server, sockets)  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        try:
            assert made.server.listening.wait(SECONDS)
            yield made
        finally:
            for client in made.clients:
                client.connection.close()
            server.should_exit = server.force_exit = True
            thread.join(SECONDS)
            made.server._election.give_up()
        assert not thread.is_alive()


def test_it_starts_privately(here: Here) -> None:
    assert here.privately("/quick", "POST") == (200, b"last")
    client = here.ask("/quick")
    client.thread.join(0.3)
    assert client.thread.is_alive()  # in the queue
    here.activate()
    assert client.result() == (200, b"last")


def test_it_is_ready_after_a_warm_up_that_went_the_private_way(here: Here) -> None:
    module = sys.modules[adapter_server.HTTP_SERVER]
    args = SimpleNamespace(url=lambda: "http://127.0.0.1:9")

    def wait_and_warmup(server_args: Any) -> str:
        assert module.requests.post(f"{server_args.url()}/quick", json={}).text == "last"
        here.sglang.server_status = "up"
        return "returned"

    assert here.server.around_warm_up(wait_and_warmup, server_args=args) == "returned"
    here.launcher.wait_ready([MAIN], SECONDS)
    # From now on the private socket is for looking.
    assert here.privately("/quick")[0] == 200
    assert here.privately("/health_generate")[0] == 503
    assert here.privately("/quick", "POST")[0] == 503


def test_a_warm_up_that_failed_is_not_ready(here: Here) -> None:
    here.server.around_warm_up(lambda server_args: None, SimpleNamespace(url=lambda: "http://127.0.0.1:9"))
    assert Ready() not in here.launcher.said[MAIN]


def test_only_who_was_elected_accepts(here: Here) -> None:
    assert "was not elected" in here.launcher.accept(here.port).problem
    here.activate()
    assert "accepts requests already" in here.launcher.accept(here.port).problem
    assert "keeps the lock" in here.launcher.give_back().problem
    assert here.launcher.retire(1).problem == ""
    assert here.launcher.give_back().problem == ""
    assert not is_taken(Path(here.slot.lock), 0)
    assert "was not elected" in here.launcher.accept(here.port).problem


def test_what_does_not_listen_is_refused(here: Here) -> None:
    here.launcher.elect()
    one, other = socket.socketpair()
    with one, other:
        assert "does not listen" in here.launcher.ask(MAIN, Accept(100), [one.fileno()]).problem


def test_requests_that_run_may_end_and_connections_close_behind_them(here: Here) -> None:
    here.activate()
    slow, stream, idle = here.ask("/slow"), here.ask("/stream"), here.ask("/quick")
    assert idle.result() == (200, b"last")
    eventually(lambda: {"/slow", "/stream"} <= here.sglang.running.keys(), SECONDS)
    retired: list[Any] = []
    retiring = threading.Thread(target=lambda: retired.append(here.launcher.retire(SECONDS)))
    retiring.start()
    eventually(lambda: idle.connection.sock.recv(1) == b"", SECONDS)  # type: ignore[attr-defined]
    assert retiring.is_alive()
    here.sglang.finish("/slow")
    here.sglang.finish("/stream")
    retiring.join(SECONDS)
    assert (slow.result(), stream.result()) == ((200, b"last"), (200, b"first last"))
    assert slow.headers["connection"] == "close"
    (done,) = retired
    assert done.problem == ""
    assert (here.sglang.aborts, here.sglang.flushes) == (0, 1)


def test_a_request_on_a_connection_that_was_just_opened_is_answered(here: Here) -> None:
    here.activate()
    client = socket.create_connection(here.port.getsockname(), SECONDS)
    with client:
        retiring = threading.Thread(target=here.launcher.retire, args=(SECONDS,))
        eventually(lambda: len(adapter_slot.public_connections(server_of(here))) == 1, SECONDS)
        retiring.start()
        eventually(lambda: here.server._accepting is None, SECONDS)
        client.sendall(b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
        retiring.join(SECONDS)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"last")


def test_a_connection_without_a_request_does_not_hold_it_up(here: Here) -> None:
    here.activate()
    with socket.create_connection(here.port.getsockname(), SECONDS) as client:
        eventually(lambda: len(adapter_slot.public_connections(server_of(here))) == 1, SECONDS)
        done = here.launcher.retire(SECONDS)
        assert done.seconds["drain"] < SECONDS / 2
        assert client.recv(1) == b""


def test_the_rest_is_aborted_and_answered(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_requests, "ANSWER_SECONDS", 0.5)
    here.activate()
    slow, stuck, stream = here.ask("/slow", "POST"), here.ask("/stuck"), here.ask("/stream")
    eventually(lambda: len(here.sglang.running) == 3, SECONDS)
    assert here.launcher.retire(0.1).problem == ""
    for client in (slow, stuck):
        assert client.result()[0] == 503
        assert (client.headers["retry-after"], client.headers["connection"]) == ("1", "close")
        assert b"retiring" in client.body
    # This one had its status already, and ends as SGLang ends it.
    assert stream.result() == (200, b"first last")
    assert here.sglang.aborts >= 2
    assert adapter_slot.public_connections(server_of(here)) == []


def test_what_runs_in_the_background_may_end(here: Here) -> None:
    here.activate()
    assert here.ask("/background").result() == (200, b"last")
    retired: list[Any] = []
    retiring = threading.Thread(target=lambda: retired.append(here.launcher.retire(SECONDS)))
    retiring.start()
    eventually(lambda: adapter_slot.public_connections(server_of(here)) == [], SECONDS)
    assert retiring.is_alive()
    here.sglang.rid_to_state.clear()
    retiring.join(SECONDS)
    assert (retired[0].problem, here.sglang.aborts, here.sglang.at_flush) == ("", 0, [0])


def test_what_runs_in_the_background_is_aborted_before_prefixes_are_forgotten(here: Here) -> None:
    here.activate()
    assert here.ask("/background").result() == (200, b"last")
    assert here.launcher.retire(0.1).problem == ""
    assert (here.sglang.aborts, here.sglang.at_flush) == (1, [0])


class TokenizedGenerateReqInput:
    """What the main process sends to the schedulers."""

    def __init__(self, prompt: int = 10, limit: int | None = 8) -> None:
        self.input_ids = [1] * prompt
        self.sampling_params = SimpleNamespace(max_new_tokens=limit)


class TokenizedEmbeddingReqInput(TokenizedGenerateReqInput):
    """The same, of which nothing is generated."""


class BatchTokenizedEmbeddingReqInput:
    """Several of these."""

    batch = (TokenizedEmbeddingReqInput(limit=128), TokenizedEmbeddingReqInput(limit=None))


class FlushCacheReqInput:
    """What uses no KV memory."""


def manager(page: int = 1, multimodal: bool = False, states: bool = False, **more: Any) -> Any:
    """As much of the tokenizer manager as is asked."""
    args = SimpleNamespace(page_size=page, **more)
    model = SimpleNamespace(is_multimodal=multimodal, states=states)
    return SimpleNamespace(server_args=args, model_config=model)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which models keep states is SGLang's to say."""
    monkeypatch.setattr(adapter_kv, "has_states", lambda config: config.states)


@pytest.mark.parametrize(
    ("given", "request_", "fits"),
    [
        (manager(), TokenizedGenerateReqInput(1014), True),
        (manager(), TokenizedGenerateReqInput(1015), False),
        (manager(64), TokenizedGenerateReqInput(900), False),
        (manager(multimodal=True), TokenizedGenerateReqInput(8000), True),
        (manager(), TokenizedGenerateReqInput(10, None), False),
        (manager(), BatchTokenizedEmbeddingReqInput(), True),
        (manager(500), BatchTokenizedEmbeddingReqInput(), False),
        (manager(speculative_num_draft_tokens=4), TokenizedGenerateReqInput(1006), True),
        (manager(speculative_num_draft_tokens=4), TokenizedGenerateReqInput(1007), False),
        (
            manager(speculative_num_draft_tokens=4, speculative_eagle_topk=4, speculative_num_steps=3),
            TokenizedGenerateReqInput(991),
            False,
        ),
        (manager(states=True), TokenizedGenerateReqInput(1014), True),
        (manager(states=True), TokenizedGenerateReqInput(1015), False),
    ],
)
def test_a_warm_up_that_has_no_room_is_not_sent(here: Here, given: Any, request_: Any, fits: bool) -> None:
    sent: list[Any] = []
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="has room for 1024 tokens"):
        here.server.around_send(lambda _, request: sent.append(request), given, request_)
    assert bool(sent) == fits


def test_warm_ups_have_room_together(here: Here) -> None:
    sent: list[Any] = []

    def send() -> None:
        here.server.around_send(lambda _, request: sent.append(request), manager(), TokenizedGenerateReqInput())

    for _ in range(1024 // 20):
        send()
    with pytest.raises(ValueError, match="has room for 1024 tokens"):
        send()
    assert len(sent) == 1024 // 20


def test_each_replica_has_room_for_its_own_warm_up(here: Here) -> None:
    sent: list[Any] = []
    given, request = manager(states=True, dp_size=4), TokenizedGenerateReqInput()
    for _ in range(8):
        here.server.around_send(lambda _, request: sent.append(request), given, request)
    with pytest.raises(ValueError, match="has room for 4096 tokens"):
        here.server.around_send(lambda _, request: sent.append(request), given, request)
    assert len(sent) == 8


def test_few_warm_ups_have_room_where_each_takes_states(here: Here) -> None:
    sent: list[Any] = []
    request = TokenizedGenerateReqInput()
    for _ in range(2):
        here.server.around_send(lambda _, request: sent.append(request), manager(states=True), request)
    with pytest.raises(ValueError, match="has room for 1024 tokens"):
        here.server.around_send(lambda _, request: sent.append(request), manager(states=True), request)
    assert len(sent) == 2


def test_nothing_is_computed_without_kv_memory_but_a_warm_up(here: Here) -> None:
    work: list[Any] = [TokenizedGenerateReqInput(), BatchTokenizedEmbeddingReqInput()]
    sent: list[Any] = []

    def send(request: Any) -> None:
        here.server.around_send(lambda _, request: sent.append(request), manager(), request)

    def refuses() -> None:
        for request in work:
            with pytest.raises(ValueError, match="is retiring: try again"):
                send(request)
        send(flush)
        assert sent.pop() is flush

    flush = FlushCacheReqInput()
    send(work[0])  # the warm-up
    here.server._requests.warm = True  # type: ignore[union-attr]
    refuses()
    here.activate()
    send(work[1])
    assert here.launcher.retire(0).problem == ""
    refuses()
    assert sent == work


def test_who_was_accepted_as_it_retires_is_answered(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop takes a connection in one round of the event loop, and makes its protocol in a later one."""
    here.activate()
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = http.client.HTTPConnection(*other.getsockname(), timeout=SECONDS)
        client.request("GET", "/quick", headers={"Connection": "close"})
        accepted, _ = other.accept()
    accept_no_more = adapter_slot.accept_no_more

    def with_one_under_way(server: Any, accepting: Any) -> None:
        accept_no_more(server, accepting)
        config, loop = server.config, asyncio.get_running_loop()

        async def made() -> None:
            await asyncio.sleep(0)
            protocol = config.http_protocol_class(
                config=config, server_state=server.server_state, app_state=server.lifespan.state
            )
            await loop.connect_accepted_socket(lambda: protocol, accepted)

        loop.making = loop.create_task(made())  # type: ignore[attr-defined]

    monkeypatch.setattr(adapter_slot, "accept_no_more", with_one_under_way)
    assert here.launcher.retire(SECONDS).problem == ""
    with closing(client):
        assert client.getresponse().status == 200


def test_whoever_else_has_the_socket_goes_on_accepting(here: Here) -> None:
    here.activate()
    assert here.ask("/quick").result()[0] == 200
    assert here.launcher.retire(1).problem == ""
    here.port.settimeout(SECONDS)
    with socket.create_connection(here.port.getsockname(), SECONDS) as client:
        accepted, _ = here.port.accept()
        with accepted:
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"
    assert here.launcher.accept(here.port).problem == ""
    assert here.ask("/quick").result()[0] == 200


@pytest.mark.parametrize(
    ("idle", "answers", "problem"),
    [(False, True, "requests still run"), (True, False, "the schedulers do not answer")],
)
def test_prefixes_that_cannot_be_forgotten(
    here: Here, monkeypatch: pytest.MonkeyPatch, idle: bool, answers: bool, problem: str
) -> None:
    monkeypatch.setattr("weightcache.engine.slot_server.FLUSH_SECONDS", 0.1)
    here.sglang.idle, here.sglang.answers_flush = idle, answers
    assert problem in here.launcher.retire(0).problem


def test_orders_before_the_server_is_up(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(str(runtime_dir / "channel"), str(runtime_dir / "lock"), str(runtime_dir / "http"))
    with ends_threads_only(monkeypatch), SlotLauncher(runtime_dir / "channel") as launcher:
        SlotServer(slot)
        launcher.wait_joined(MAIN)
        assert "not up yet" in launcher.retire(1).problem


def test_other_servers_bind_their_own(here: Here) -> None:
    given: list[Any] = []

    async def original(_: Any, sockets: Any) -> None:
        given.append(sockets)

    other: Any = SimpleNamespace(config=SimpleNamespace(app=object()))
    asyncio.run(here.server.around_startup(original, other))
    assert given == [None]


def test_a_private_path_that_is_taken_ends_the_engine(here: Here) -> None:
    server: Any = SimpleNamespace(config=SimpleNamespace(app=here.sglang.app))

    async def original(*_: Any) -> None:
        pytest.fail("it must not listen")

    with pytest.raises(SystemExit, match="another process listens at"):
        asyncio.run(here.server.around_startup(original, server))


def test_the_private_socket_speaks_no_tls() -> None:
    config = SimpleNamespace(ssl="context", loaded_app="app")
    seen: list[Any] = []

    async def original(server: Any, sockets: Any) -> None:
        seen.append((server.config.ssl, server.config.loaded_app, sockets))

    asyncio.run(adapter_slot.start(original, SimpleNamespace(config=config), "socket", lambda app: ["around", app]))  # type: ignore[arg-type]
    assert seen == [(None, ["around", "app"], ["socket"])]
    assert config.ssl == "context"


def server_of(here: Here) -> Any:
    """uvicorn's."""
    return here.server._server
