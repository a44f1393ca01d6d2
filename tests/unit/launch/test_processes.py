"""A tree of processes that is held: nobody else's process is ever taken for one of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.support import alive, eventually
from weightcache.launch import processes
from weightcache.launch.processes import Tree, below
from weightcache.standby import fence
from weightcache.standby.messages import Process

CHILD = ["sh", "-c", "sleep 60 & sleep 60; true"]


def opened() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed in the end."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_whole_tree_is_held_and_ends() -> None:
    with running(*CHILD) as root:
        assert eventually(lambda: len(below(root.pid)) == 3)
        tree = Tree(root.pid)
        tree.update()
        pids = {process.pid for process in tree.held}
        assert pids == set(below(root.pid))
        assert all(process == fence.identify(process.pid) for process in tree.held)
        assert tree.kill(10)
        assert not any(alive(pid) for pid in pids)
        tree.close()


@pytest.mark.parametrize("child", [False, True])
def test_a_number_that_went_to_somebody_else_is_not_held(monkeypatch: pytest.MonkeyPatch, child: bool) -> None:
    """Between the look at /proc and pidfd_open(2): the process that was seen is gone, its number another one's."""
    with running("sleep", "60") as stranger:
        now = fence.identify(stranger.pid)
        seen = Process(stranger.pid, now.started - 1)
        monkeypatch.setattr(processes, "_tree", lambda _: [seen, now] if child else [seen])
        before = opened()
        tree = Tree(os.getpid())
        tree.update()
        assert list(tree.held) == ([now] if child else [])
        assert tree.wait(0.0) is not child
        tree.close()
        assert opened() == before
        assert alive(stranger.pid)


def test_a_number_that_was_held_is_held_again_for_who_has_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("sleep", "60") as one:
        known = fence.identify(one.pid)
        earlier = Process(one.pid, known.started - 1)
        tree = Tree(os.getpid(), {earlier: os.open(os.devnull, os.O_RDONLY)})
        monkeypatch.setattr(processes, "_tree", lambda _: [known])
        tree.update()
        assert list(tree.held) == [earlier, known]
        tree.close()


def test_a_wait_ends_early_for_what_somebody_else_says() -> None:
    with running("sleep", "60") as one, running("sleep", "60") as other:
        tree = Tree(os.getpid())
        tree.update()
        assert {one.pid, other.pid} <= {process.pid for process in tree.held}
        tree.held = {process: fd for process, fd in tree.held.items() if process.pid in (one.pid, other.pid)}
        event = os.eventfd(0)
        before = opened()
        one.kill()
        began = time.monotonic()
        assert not tree.wait(0.2, event)
        assert time.monotonic() - began >= 0.2
        os.eventfd_write(event, 1)
        assert not tree.wait(60, event)
        assert time.monotonic() - began < 30
        other.kill()
        assert tree.wait(60)
        assert opened() == before
        tree.close()
        os.close(event)


def test_who_is_gone_is_not_held() -> None:
    with running("sleep", "60") as one:
        known = fence.identify(one.pid)
    assert processes._hold(known) is None
    tree = Tree(one.pid)
    tree.update()
    assert tree.held == {}
    assert tree.wait(0.0)
