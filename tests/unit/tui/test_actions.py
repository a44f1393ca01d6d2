"""Evict, drain and journal: what is asked, what is sent, and that the screen goes on meanwhile."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import FakeAgent
from tests.unit.tui import build
from tests.unit.tui.shown import SITE, Shown, shown
from weightcache import paths
from weightcache.config import Config
from weightcache.monitor.site import Site
from weightcache.protocol import Done, Drain, Evict, Failure, Message
from weightcache.tui import actions
from weightcache.tui.screens.dialogs import Confirm

pytestmark = pytest.mark.asyncio


@contextmanager
def agent(directory: Path, answer: Callable[[Message], Message]) -> Iterator[tuple[Site, FakeAgent]]:
    directory.chmod(0o755)
    made = FakeAgent(directory, 0, lambda message: [answer(message)])
    try:
        yield Site(Config(), directory), made
    finally:
        made.close()


async def until(top: Shown, part: str) -> None:
    deadline = time.monotonic() + 5
    while part not in top.text.replace("\n", " ") and time.monotonic() < deadline:
        await top.pilot.pause(0.02)
    assert part in top.text


async def test_evict_asks_and_then_tells(tmp_path: Path) -> None:
    with agent(tmp_path, lambda _: Done("evicted it\x1b[2J[red]")) as (site, fake):
        async with shown(build.parked(), (100, 30), site=site, readonly=False) as top:
            await top.press("e")
            assert "Evict set 6ee3da0a074c (target, version 1) of rank 0?" in top.text
            assert "Frees 16.4 GB" in top.text
            assert "No engine uses it." in top.text
            await top.press("n")
            assert fake.asked == []
            await top.press("e", "y")
            await until(top, "evicted it\\x1b[2J[red]")
            assert fake.asked == [Evict("6ee3da0a074c")]


async def test_evict_says_who_uses_the_set(tmp_path: Path) -> None:
    with agent(tmp_path, lambda _: Failure("in-use", "set 6ee3 is in use by pid 41700")) as (site, _):
        async with shown(build.ready(), (100, 30), site=site, readonly=False) as top:
            await top.press("e")
            assert "the agent will refuse" in top.text
            assert "engine 41700 (root, sglang-chat.service)" in top.text
            await top.press("y")
            await until(top, "is in use by pid 41700")


async def test_drain_does_not_block(tmp_path: Path) -> None:
    released = threading.Event()

    def slowly(_: Message) -> Message:
        released.wait(10)
        return Done("rank 0 is drained until `wcache resume`")

    with agent(tmp_path, slowly) as (site, fake):
        async with shown(build.ready(), (100, 30), site=site, readonly=False) as top:
            await top.press("d")
            assert "Drain rank 0?" in top.text
            assert "Waits 60 s for these engines" in top.text
            await top.press("y", "tab", "enter")
            assert "Set 6ee3da0a074c" in top.text
            released.set()
            await until(top, "drained until")
            assert fake.asked == [Drain(60.0)]


async def test_an_agent_that_is_gone() -> None:
    async with shown(build.ready(), (100, 30), readonly=False) as top:
        await top.press("d", "y")
        await until(top, "no agent listens")


async def test_leaving_before_the_answer(tmp_path: Path) -> None:
    released = threading.Event()

    def late(_: Message) -> Message:
        released.wait(10)
        return Done("late")

    with agent(tmp_path, late) as (site, _):
        async with shown(build.ready(), site=site, readonly=False) as top:
            await top.press("d", "y")
        released.set()
        asking = [thread for thread in threading.enumerate() if thread.name == "ask-0"]
        for thread in asking:
            thread.join(5)
            assert not thread.is_alive()


@pytest.mark.parametrize("key", ["e", "d"])
async def test_reasons_why_not(key: str) -> None:
    async with shown(build.ready()) as top:
        await top.press(key)
        assert "read-only" in top.text
        assert not isinstance(top.app.screen, Confirm)
    async with shown(build.ready(), site=None, readonly=False) as top:
        await top.press(key)
        assert "this is a replay" in top.text
    async with shown(build.empty(), readonly=False) as top:
        await top.press(key)
        assert "is selected" in top.text


async def test_a_drained_rank_is_not_drained_again() -> None:
    async with shown(build.drained(), (120, 30), readonly=False) as top:
        await top.press("d")
        assert "rank 0 is drained already" in top.text


async def test_events_instead_of_a_journal() -> None:
    async with shown(build.fleet(), (100, 20)) as top:
        await top.press("4", "l")
        assert "Events of rank 4" in top.text
        assert "no unit's journal can be expected here: this is what the agent told" in top.text
        assert "leased: pid 40188 leases a set" not in top.text
        await top.press("end")
        assert "leased: pid 40188 leases a set" in top.text
        await top.press("escape")
        assert "RANK" in top.text


async def test_journal_of_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions.shutil, "which", lambda name: f"/bin/{name}")
    asked: list[Any] = []
    monkeypatch.setattr(actions, "show", lambda app, command: asked.append(command) or True)
    site = Site(Config(), paths.SYSTEM_RUNTIME_DIR)
    async with shown(build.fleet(), site=site) as top:
        await top.press("2", "l")
    assert asked == [["/bin/journalctl", "--unit", "weightcache@2", "--lines", "1000", "--pager-end"]]


async def test_journal_where_the_terminal_cannot_be_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is run"))
    async with shown(build.ready(), (100, 30), site=Site(Config(), paths.SYSTEM_RUNTIME_DIR)) as top:
        await top.press("l")
        assert "a pager cannot be shown here" in top.text


async def test_no_journal_without_journalctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions.shutil, "which", lambda _: None)
    assert actions.journal(Site(Config(), paths.SYSTEM_RUNTIME_DIR), 0) is None
    assert actions.journal(SITE, 0) is None
