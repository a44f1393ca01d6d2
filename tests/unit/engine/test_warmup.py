"""The warm-up without requests: when it is taken, what it waits for, and what it leaves to SGLang."""

from __future__ import annotations

import socket
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightcache.engine import adapter_server, warmup


class Server:
    """In the place of SGLang's http_server: its warm-up, and what runs it in a thread."""

    def __init__(self) -> None:
        self.module: Any = types.ModuleType(adapter_server.HTTP_SERVER)
        self.module.ServerStatus = SimpleNamespace(Up="up")
        self.manager = SimpleNamespace(server_status="starting")
        self.module._global_state = SimpleNamespace(tokenizer_manager=self.manager)
        self.module._execute_server_warmup = self.execute
        self.succeeds = True
        self.warmed_up = 0
        self.afterwards: list[str] = []

    def execute(self, server_args: Any) -> bool:
        self.warmed_up += 1
        if self.succeeds:
            self.manager.server_status = "up"
        return self.succeeds

    def wait_and_warmup(self, server_args: Any, execute_warmup_func: Callable[[Any], bool] | None = None) -> None:
        execute = execute_warmup_func or self.execute
        if execute(server_args):
            self.afterwards.append("freeze")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setitem(sys.modules, adapter_server.HTTP_SERVER, made.module)
    return made


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def arguments(listener: socket.socket | None = None, **others: Any) -> Any:
    port = listener.getsockname()[1] if listener else 9
    known = {"disaggregation_mode": "null", "tokenizer_worker_num": 1, "debug_tensor_dump_input_file": None} | others
    return SimpleNamespace(url=lambda: f"http://127.0.0.1:{port}", **known)


def test_the_first_start_warms_up_and_the_second_does_not(
    server: Server, listener: socket.socket, tmp_path: Path
) -> None:
    warmed = tmp_path / "warmed" / "start"
    around = warmup.hook(warmed)
    own = server.module._execute_server_warmup
    around(server.wait_and_warmup, server_args=arguments(listener), execute_warmup_func=own)
    assert (server.warmed_up, server.manager.server_status, server.afterwards) == (1, "up", ["freeze"])
    assert warmed.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in warmed.parent.iterdir()] == ["start"]
    server.manager.server_status = "starting"
    around(server.wait_and_warmup, server_args=arguments(listener), execute_warmup_func=own)
    assert (server.warmed_up, server.manager.server_status, server.afterwards) == (1, "up", ["freeze", "freeze"])


def test_a_failed_warm_up_is_not_noted(server: Server, tmp_path: Path) -> None:
    server.succeeds = False
    warmup.hook(tmp_path / "start")(server.wait_and_warmup, server_args=arguments())
    assert list(tmp_path.iterdir()) == []
    assert server.afterwards == []


def test_a_folder_that_cannot_be_written_costs_the_next_warm_up_only(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warmup.hook(tmp_path / "file" / "start")(server.wait_and_warmup, server_args=arguments())
    assert server.afterwards == ["freeze"]


def test_it_is_ready_when_it_listens(
    server: Server, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    connect = socket.create_connection

    def late(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(timeout)
        if len(tried) < 4:
            raise ConnectionRefusedError
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", late)
    (tmp_path / "start").touch()
    warmup.hook(tmp_path / "start")(server.wait_and_warmup, server_args=arguments(listener))
    assert len(tried) == 4
    assert (server.warmed_up, server.manager.server_status) == (0, "up")


def test_a_server_that_does_not_listen_is_left_to_sglang(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "LISTEN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        args = arguments(closed)
    server.succeeds = False
    (tmp_path / "start").touch()
    warmup.hook(tmp_path / "start")(server.wait_and_warmup, server_args=args)
    assert (server.warmed_up, server.afterwards) == (1, [])


def test_a_port_that_is_held_listens_before_the_server_does(
    server: Server, listener: socket.socket, tmp_path: Path
) -> None:
    (tmp_path / "start").touch()
    listening = threading.Event()
    around = warmup.hook(tmp_path / "start", listening)
    thread = threading.Thread(target=around, args=(server.wait_and_warmup, arguments(listener)))
    thread.start()
    thread.join(0.3)
    assert server.manager.server_status == "starting"
    listening.set()
    thread.join(10)
    assert (server.warmed_up, server.manager.server_status) == (0, "up")


@pytest.mark.parametrize(
    "others", [{"disaggregation_mode": "prefill"}, {"tokenizer_worker_num": 4}, {"debug_tensor_dump_input_file": "x"}]
)
def test_other_kinds_of_servers_warm_up_in_their_own_ways(
    server: Server, others: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "start").touch()
    warmup.hook(tmp_path / "start")(server.wait_and_warmup, server_args=arguments(**others))
    assert server.warmed_up == 1


def test_a_callers_own_warm_up_is_called(server: Server, tmp_path: Path) -> None:
    (tmp_path / "start").touch()
    called = threading.Event()

    def own(_: Any) -> bool:
        called.set()
        return True

    warmup.hook(tmp_path / "start")(server.wait_and_warmup, server_args=arguments(), execute_warmup_func=own)
    assert called.is_set()
    assert server.warmed_up == 0
