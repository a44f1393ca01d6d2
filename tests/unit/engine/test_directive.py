"""What the launcher says and what the plugin reports."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.unit.contracts.strategies import values
from tests.unit.contracts.test_transport import listener
from tests.unit.engine.fakes import directive
from weightcache import transport
from weightcache.engine import directive as directives
from weightcache.engine.directive import Decision, Directive, PluginReady, Report
from weightcache.errors import UsageError

READY = PluginReady(1, "main", "0.5.23")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(values(Directive))
def test_a_directive_survives_the_environment(given_: Directive) -> None:
    assert directives.read(given_.environment()) == given_


def test_no_directive_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert directives.read({}) is None
    assert directives.read({directives.VARIABLE: ""}) is None
    monkeypatch.setenv(directives.VARIABLE, directive().environment()[directives.VARIABLE])
    assert directives.read() == directive()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"purpose": "other"}', "\0"])
def test_a_malformed_directive(text: str) -> None:
    with pytest.raises(UsageError, match="WEIGHTCACHE_DIRECTIVE is malformed"):
        directives.read({directives.VARIABLE: text})


def test_the_token_is_not_in_the_directive() -> None:
    assert "token" not in directive().environment()[directives.VARIABLE].lower()


def test_one_token_for_all_agents_or_one_each() -> None:
    assert directives.token_for(3, {}) == ""
    assert directives.token_for(3, {directives.TOKEN_VARIABLE: "abc"}) == "abc"
    each = {directives.TOKEN_VARIABLE: "0=abc,10=def"}
    assert [directives.token_for(agent, each) for agent in (0, 10)] == ["abc", "def"]
    for malformed in (each[directives.TOKEN_VARIABLE], "1,2=x", "=,=", "1 =x"):
        with pytest.raises(UsageError, match="holds no token for agent 1"):
            directives.token_for(1, {directives.TOKEN_VARIABLE: malformed})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(values(Decision | PluginReady))
def test_a_report_survives(report: Report) -> None:
    assert directives.decode_report(directives.encode_report(report)) == report


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b"{}", b'{"type": "Decision"}', b'{"type": "PluginReady"}', b"\xff"]
)
def test_a_malformed_report(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        directives.decode_report(data)


def test_a_report_reaches_the_launcher(runtime_dir: Path) -> None:
    with listener(runtime_dir / "r", 5) as server:
        directives.send_report(directive(report=str(runtime_dir / "r")), READY)
        sock, _ = server.accept()
        with sock:
            assert directives.decode_report(transport.receive_packet(sock).data) == READY
            assert transport.receive_packet(sock).data == b""


@pytest.mark.parametrize("kind", ["none", "absent", "full", "closing"])
def test_a_launcher_that_does_not_listen_stops_nobody(runtime_dir: Path, kind: str) -> None:
    path = runtime_dir / "r"
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    started = time.monotonic()
    if kind in ("none", "absent"):
        directives.send_report(directive(report="" if kind == "none" else str(path)), READY, timeout=0.2)
    else:
        with listener(path, 0) as server:
            full = transport.connect(path, time.monotonic() + 1)
            closing = threading.Thread(target=lambda: server.accept()[0].close())
            if kind == "closing":
                closing.start()
            directives.send_report(directive(report=str(path)), READY, timeout=0.2)
            if kind == "closing":
                closing.join(10)
            full.close()
    assert time.monotonic() - started < 2
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_reports_are_small_json() -> None:
    body: dict[str, Any] = json.loads(directives.encode_report(READY))
    assert body == {"type": "PluginReady", "pid": 1, "process": "main", "sglang_version": "0.5.23"}
    assert isinstance(socket.AF_UNIX, int)
