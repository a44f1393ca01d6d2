"""How the screen is started: with which source, for whom, and what is closed after it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.monitor import made
from tests.unit.monitor.made import Watched
from tests.unit.top.conftest import Top
from weightcache.errors import WeightcacheError
from weightcache.monitor.live import Live
from weightcache.monitor.recording import Recorded, Recorder
from weightcache.monitor.replay import Replay
from weightcache.tui import main as module


class Screen:
    """Stands for the app; remembers how it was made and takes some looks."""

    made: dict[str, Any]
    looks = 1
    return_code = 0
    error: BaseException | None = None

    def __init__(self, source: Any, **keywords: Any) -> None:
        Screen.made = {"source": source, **keywords}

    def run(self, *, mouse: bool) -> None:
        Screen.made["mouse"] = mouse
        Screen.made["seen"] = [Screen.made["source"].snapshot() for _ in range(self.looks)]
        if self.error:
            raise self.error


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> type[Screen]:
    app = ModuleType("weightcache.tui.app")
    app.Top = Screen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "weightcache.tui.app", app)
    monkeypatch.setattr(module, "_has_screen", lambda: True)
    for name, value in (("looks", 1), ("return_code", 0), ("error", None)):
        monkeypatch.setattr(Screen, name, value)
    return Screen


def test_a_screen(top: Top, screen: type[Screen]) -> None:
    with Watched(top.run):
        assert top().status == 0
    assert isinstance(screen.made["source"], Live)
    assert screen.made["site"].directory == top.run
    chosen = [screen.made[name] for name in ("interval", "ascii", "readonly", "mouse")]
    assert chosen == [1.0, False, os.geteuid() != 0, True]


def test_choices(top: Top, screen: type[Screen]) -> None:
    top("--interval", "2.5", "--ascii", "--no-mouse", "--readonly", "--rank", "3")
    assert [screen.made[name] for name in ("interval", "ascii", "readonly", "mouse")] == [2.5, True, True, False]


def test_a_replay_may_change_nothing(top: Top, screen: type[Screen], tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as recorder:
        recorder.write(made.snapshot(at=5.0))
    assert top("--replay", str(tmp_path / "r")).status == 0
    assert isinstance(screen.made["source"], Replay)
    assert screen.made["readonly"] is True
    assert screen.made["seen"][0].at == 5.0


def test_what_is_looked_at_can_be_recorded(top: Top, screen: type[Screen], tmp_path: Path) -> None:
    with Watched(top.run):
        assert top("--record", str(tmp_path / "r")).status == 0
    assert isinstance(screen.made["source"], Recorded)
    assert screen.made["source"].changed is not None
    assert len((tmp_path / "r").read_text().splitlines()) == 2


def test_a_recording_that_broke_is_said_afterwards(
    top: Top, screen: type[Screen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: object, _snapshot: object) -> None:
        raise WeightcacheError("the disk is full")

    monkeypatch.setattr(Recorder, "write", fail)
    got = top("--record", str(tmp_path / "r"))
    assert (got.status, got.err) == (70, "wcache-top: the disk is full\n")


def test_the_apps_own_failure(top: Top, screen: type[Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Screen, "return_code", 1)
    assert top().status == 1
    monkeypatch.setattr(Screen, "error", RuntimeError("a bug"))
    got = top()
    assert got.status == 70
    assert got.err == "wcache-top: internal error: RuntimeError: a bug (WEIGHTCACHE_TRACEBACK=1 shows where)\n"


def test_who_may_operate(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    site = made.site(top.run)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not module.may_operate(site)
    with Watched(top.run) as agent:
        assert not module.may_operate(site)
        os.chown(agent._path, 12345, -1)
        assert module.may_operate(site)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert module.may_operate(site)


def test_a_terminal_is_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for term, expected in (("xterm", True), ("dumb", False), ("", False)):
        monkeypatch.setenv("TERM", term)
        assert module._has_screen() is expected
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert not module._has_screen()
    assert json.dumps(module.INTERVALS) == "[0.25, 60.0]"
