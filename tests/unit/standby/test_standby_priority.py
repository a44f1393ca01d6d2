"""Who comes first on a GPU: what is read, what is asked of the kernel, and what is not believed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache.standby import fence, status
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Process
from weightcache.standby.places import EnginePaths
from weightcache.standby.priority import Claim
from weightcache.standby.status import SlotStatus

GPUS = ("GPU-1", "GPU-2")


def say(folder: Path, name: str, priority: int, gpus: tuple[str, ...] = GPUS, slot: str = "a", **more: object) -> None:
    said = SlotStatus(name, slot, "standby", 0.0, fence.identify(os.getpid()), priority=priority, gpus=gpus, size=2)
    status.write(EnginePaths(folder, name).status(slot), dataclasses.replace(said, **more))  # type: ignore[arg-type]


@contextlib.contextmanager
def held(folder: Path, name: str, byte: int) -> Iterator[None]:
    lock = ByteLock(EnginePaths(folder, name).lock, byte)
    lock.take()
    try:
        yield
    finally:
        lock.close()


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(EnginePaths(tmp_path, "mine"), frozenset({"GPU-2", "GPU-3"}), 5)


def test_who_has_the_lock_comes_first_and_who_waits_does_not(claim: Claim, tmp_path: Path) -> None:
    say(tmp_path, "high", 9)
    assert claim.more_important() == ""
    with held(tmp_path, "high", 0):
        assert claim.more_important() == "high"
        say(tmp_path, "high", 5)
        assert claim.more_important() == ""
        say(tmp_path, "high", 9, ("GPU-1",))
        assert claim.more_important() == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_in_the_way_is_who_has_memory(claim: Claim, tmp_path: Path, rank: int) -> None:
    say(tmp_path, "low", 1)
    say(tmp_path, "high", 9)
    with held(tmp_path, "low", 0):
        assert claim.in_the_way() == ()
    with held(tmp_path, "low", 1 + rank), held(tmp_path, "high", 1 + rank):
        assert claim.in_the_way() == ("low",)


def test_both_slots_of_less_important_engines_are_told(claim: Claim, tmp_path: Path) -> None:
    for slot in "ab":
        say(tmp_path, "low", 1, slot=slot)
        say(tmp_path, "mine", 5, slot=slot)
    say(tmp_path, "high", 9)
    low = EnginePaths(tmp_path, "low")
    assert claim.less_important() == (low.control("a"), low.control("b"))


@pytest.mark.parametrize(
    "wrong",
    [{"launcher": Process(os.getpid(), 1)}, {"role": "down"}, {"engine": "another"}],
)
def test_a_status_that_nobody_stands_for_counts_for_nothing(
    claim: Claim, tmp_path: Path, wrong: dict[str, object]
) -> None:
    say(tmp_path, "high", 9, **wrong)
    with held(tmp_path, "high", 0):
        assert claim.more_important() == ""


def test_files_that_make_no_sense_are_passed_over(claim: Claim, tmp_path: Path) -> None:
    (tmp_path / "noslot.json").write_text("{}")
    (tmp_path / "bad-a.json").write_text("[")
    (tmp_path / "link-a.json").symlink_to("/dev/zero")
    say(tmp_path, "high", 9)
    with held(tmp_path, "high", 0):
        assert claim.more_important() == "high"


def test_without_a_directory_there_is_nobody(tmp_path: Path) -> None:
    claim = Claim(EnginePaths(tmp_path / "none", "mine"), frozenset(GPUS), 1)
    assert (claim.more_important(), claim.in_the_way(), claim.less_important()) == ("", (), ())
