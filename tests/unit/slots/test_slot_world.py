"""What an engine of a slot sees of the others, and what it takes for so when its launcher cannot look."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.descriptors import descriptors
from weightcache.launch.slot_world import UNSEEN, SlotWorld
from weightcache.standby import fence, status
from weightcache.standby.locks import ByteLock
from weightcache.standby.places import EnginePaths, SlotName
from weightcache.standby.priority import Blocker, Claim
from weightcache.standby.status import SlotStatus

GPUS = ("GPU-1",)


@contextlib.contextmanager
def running(folder: Path, engine: str, priority: int) -> Iterator[None]:
    """Another engine that has the lock of its own."""
    said = SlotStatus(engine, "a", "active", 0.0, fence.identify(os.getpid()), priority=priority, gpus=GPUS, size=1)
    status.write(EnginePaths(folder, engine).status("a"), said)
    with contextlib.closing(ByteLock(EnginePaths(folder, engine).lock, 0)) as lock:
        lock.take()
        yield


@pytest.fixture
def world(tmp_path: Path) -> SlotWorld:
    paths = EnginePaths(tmp_path, "mine")
    nobody: Any = None
    return SlotWorld(SlotName("mine", "a"), paths, nobody, nobody, Claim(paths, frozenset(GPUS), 5))


def test_who_cannot_look_knows_nothing_of_more_important_engines(
    world: SlotWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = "nobody can tell whether a more important engine is there"
    with running(tmp_path, "high", 9):
        for _ in range(2):
            with descriptors(0):
                assert [world.parked() for _ in range(3)] == [None] * 3
                assert world.outranked().startswith(f"{blind}: {tmp_path}")
                assert world.outranked().endswith("(Too many open files)")
            assert capsys.readouterr().err.count(blind) == 1
            assert world.parked() is True
            assert world.outranked() == "high is more important, and has the same GPU"
    assert world.parked() is False
    assert world.outranked() == ""
    EnginePaths(tmp_path, "mine").parked.touch()
    with descriptors(0):
        assert world.parked() is True  # the marker can be seen without a descriptor
        assert world.outranked().startswith(blind)
    assert world.parked() is True
    assert world.outranked() == ""


def test_who_cannot_look_waits_for_whoever_may_be_there(
    world: SlotWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with descriptors(0):
        assert world.in_the_way() == (UNSEEN,)
    with running(tmp_path, "low", 1):
        with descriptors(0):
            assert world.in_the_way() == (UNSEEN,)
        assert world.in_the_way() == (Blocker("low", leaving=False),)
    assert world.in_the_way() == ()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("GPU memory of ")[2] for line in said] == [UNSEEN.engine, "low"]


def test_who_cannot_look_tells_nobody_and_leaves_the_lock_to_others(world: SlotWorld, tmp_path: Path) -> None:
    lock = EnginePaths(tmp_path, "mine").lock
    with running(tmp_path, "low", 1), contextlib.closing(ByteLock(lock, 0)) as byte:
        byte.take()
        with descriptors(0):
            world.tell_others()
            assert not world.taken()
        assert world.taken()
