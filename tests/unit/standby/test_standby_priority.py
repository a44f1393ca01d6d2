"""Who comes first on a GPU: what is read, what is asked of the kernel, and what is not believed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors
from weightcache.errors import NoRoom
from weightcache.standby import fence, status
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Process
from weightcache.standby.places import EnginePaths
from weightcache.standby.priority import Blocker, Claim
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


@pytest.mark.parametrize("byte", [1, 2])
def test_who_lost_its_lock_is_there_while_its_ranks_have_memory(claim: Claim, tmp_path: Path, byte: int) -> None:
    say(tmp_path, "high", 9)
    with held(tmp_path, "high", byte):
        assert claim.more_important() == "high"
    with held(tmp_path, "high", 3):
        assert claim.more_important() == ""


@pytest.mark.parametrize("byte", [0, 1, 2])
def test_in_the_way_is_who_has_memory_or_may_take_it(claim: Claim, tmp_path: Path, byte: int) -> None:
    """Byte 0 alone: an engine that was elected at the same moment, and did not see this one yet."""
    say(tmp_path, "low", 1)
    say(tmp_path, "high", 9)
    assert claim.in_the_way() == ()
    with held(tmp_path, "low", byte), held(tmp_path, "high", byte):
        assert claim.in_the_way() == (Blocker("low", leaving=False),)


@pytest.mark.parametrize(
    ("role", "leaving"),
    [("active", False), ("parked", False), ("starting", False), ("promoting", True), ("retiring", True)],
)
def test_who_leaves_says_so(claim: Claim, tmp_path: Path, role: str, leaving: bool) -> None:
    say(tmp_path, "low", 1, role=role)
    say(tmp_path, "low", 1, slot="b")
    with held(tmp_path, "low", 0):
        assert claim.in_the_way() == (Blocker("low", leaving),)


def test_of_two_elected_at_once_one_sees_the_other(tmp_path: Path) -> None:
    gpus = frozenset(GPUS)
    low, high = (Claim(EnginePaths(tmp_path, name), gpus, n) for name, n in (("low", 1), ("high", 9)))
    say(tmp_path, "low", 1)
    say(tmp_path, "high", 9)
    with held(tmp_path, "low", 0):
        assert low.more_important() == ""  # it goes on, and has no memory yet
        with held(tmp_path, "high", 0):
            assert high.in_the_way() == (Blocker("low", leaving=False),)
            assert low.more_important() == "high"


def test_both_slots_of_less_important_engines_are_told(claim: Claim, tmp_path: Path) -> None:
    for slot in "ab":
        say(tmp_path, "low", 1, slot=slot)
        say(tmp_path, "mine", 5, slot=slot)
    say(tmp_path, "high", 9)
    low = EnginePaths(tmp_path, "low")
    assert claim.less_important() == (low.control("a"), low.control("b"))


DEAD = Process(os.getpid(), 1)


@pytest.mark.parametrize("wrong", [{"launcher": DEAD}, {"role": "down"}])
@pytest.mark.parametrize("byte", [0, 1])
def test_who_has_memory_has_it_without_a_launcher_too(
    claim: Claim, tmp_path: Path, wrong: dict[str, object], byte: int
) -> None:
    say(tmp_path, "high", 9, **wrong)
    say(tmp_path, "low", 1, **wrong)
    assert (claim.more_important(), claim.in_the_way()) == ("", ())
    with held(tmp_path, "high", byte), held(tmp_path, "low", byte):
        assert claim.more_important() == "high"
        assert claim.in_the_way() == (Blocker("low", leaving=False),)


def test_what_a_dead_launcher_said_counts_for_nothing_beside_a_living_one(claim: Claim, tmp_path: Path) -> None:
    say(tmp_path, "other", 9, slot="b", launcher=DEAD)
    say(tmp_path, "other", 1)
    with held(tmp_path, "other", 0):
        assert claim.more_important() == ""
        say(tmp_path, "other", 9, ("GPU-1",))
        assert claim.more_important() == ""


def test_a_status_under_another_name_counts_for_nothing(claim: Claim, tmp_path: Path) -> None:
    say(tmp_path, "high", 9, engine="another")
    with held(tmp_path, "high", 0):
        assert claim.more_important() == ""


def test_a_look_at_an_engine_of_many_ranks_opens_its_lock_once(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(tmp_path, "high", 9, size=status.MOST_RANKS)
    lock, opened, calls = EnginePaths(tmp_path, "high").lock, os.open, []

    def counted(path: object, *more: object, **named: object) -> int:
        calls.append(path)
        return opened(path, *more, **named)  # type: ignore[arg-type]

    with held(tmp_path, "high", status.MOST_RANKS), monkeypatch.context() as patch:
        patch.setattr(os, "open", counted)
        assert claim.more_important() == "high"
    assert calls.count(lock) == 1


@pytest.mark.parametrize("size", [-1, status.MOST_RANKS + 1, 3_000_000])
def test_an_engine_with_more_ranks_than_any_is_passed_over(tmp_path: Path, size: int) -> None:
    said: list[str] = []
    claim = Claim(EnginePaths(tmp_path, "mine"), frozenset(GPUS), 5, said.append)
    say(tmp_path, "high", 9, size=size)
    with held(tmp_path, "high", 0):
        assert claim.more_important() == ""
    assert len(said) == 1
    assert said[0].endswith(f"({size} ranks)")


@pytest.mark.parametrize("engine", ["high", "low"])
def test_an_engine_whose_lock_cannot_be_read_is_passed_over_and_said_once(tmp_path: Path, engine: str) -> None:
    said: list[str] = []
    claim = Claim(EnginePaths(tmp_path, "mine"), frozenset(GPUS), 5, said.append)
    for name, priority in (("high", 9), ("low", 1)):
        say(tmp_path, name, priority)
    lock = EnginePaths(tmp_path, engine).lock
    lock.symlink_to("/dev/zero")
    for _ in range(3):
        assert (claim.more_important(), claim.in_the_way()) == ("", ())
    assert len(said) == 1
    assert said[0].startswith(f"{engine} is passed over where priorities count: {lock} cannot be opened")


@pytest.mark.parametrize("left", [0, 1])
def test_without_descriptors_nobody_is_said_not_to_be_there(tmp_path: Path, left: int) -> None:
    """With one left, a file can be read, and not whether its launcher lives."""
    said: list[str] = []
    claim = Claim(EnginePaths(tmp_path, "mine"), frozenset(GPUS), 5, said.append)
    say(tmp_path, "high", 9)
    say(tmp_path, "low", 1)
    with held(tmp_path, "high", 0), held(tmp_path, "low", 0):
        for look in (claim.more_important, claim.in_the_way, claim.less_important):
            with descriptors(left), pytest.raises(NoRoom, match="Too many open files"):
                look()
        assert (claim.more_important(), claim.in_the_way()) == ("high", (Blocker("low", leaving=False),))
    assert said == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_for_its_lock_nobody_is_said_not_to_be_there(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    say(tmp_path, "high", 9)
    lock, opened = EnginePaths(tmp_path, "high").lock, os.open

    def full(path: object, *more: object, **named: object) -> int:
        if path == lock:
            raise OSError(number, os.strerror(number))
        return opened(path, *more, **named)  # type: ignore[arg-type]

    with held(tmp_path, "high", 0), monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(NoRoom, match=os.strerror(number)):
            claim.more_important()


def test_files_that_make_no_sense_are_passed_over(claim: Claim, tmp_path: Path) -> None:
    (tmp_path / "noslot.json").write_text("{}")
    (tmp_path / "bad-a.json").write_text("[")
    (tmp_path / "link-a.json").symlink_to("/dev/zero")
    said: list[str] = []
    claim = dataclasses.replace(claim, complain=said.append)
    say(tmp_path, "high", 9)
    with held(tmp_path, "high", 0):
        assert [claim.more_important() for _ in range(3)] == ["high"] * 3
    assert [text.partition(" is passed over")[0] for text in said] == ["bad-a", "link-a"]


def test_without_a_directory_there_is_nobody(tmp_path: Path) -> None:
    claim = Claim(EnginePaths(tmp_path / "none", "mine"), frozenset(GPUS), 1)
    assert (claim.more_important(), claim.in_the_way(), claim.less_important()) == ("", (), ())
