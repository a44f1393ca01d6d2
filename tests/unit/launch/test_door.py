"""A door of the launcher: who may come, what was left at its place, and what is left of it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors
from weightcache import transport
from weightcache.launch import door as module
from weightcache.launch.channel import Channel
from weightcache.launch.control import Control
from weightcache.launch.door import Door
from weightcache.launch.reports import Receiver
from weightcache.standby.control import Reply

SECONDS = 5.0


def opened() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_somebody_comes_and_nothing_waits(runtime_dir: Path) -> None:
    before = opened()
    door = Door(runtime_dir / "door")
    assert not select.select([door], [], [], 0)[0]
    assert door.accept() is None
    with transport.connect(runtime_dir / "door", time.monotonic() + SECONDS) as client:
        assert select.select([door], [], [], SECONDS)[0]
        with door.accept() or pytest.fail("nobody came") as guest:
            with pytest.raises(BlockingIOError):
                guest.recv(1)
            assert not guest.get_inheritable()
            client.send(b"word")
            assert guest.recv(10) == b"word"
    door.close()
    door.close()
    assert not (runtime_dir / "door").exists()
    assert opened() == before


def test_what_a_dead_launcher_left_there_is_replaced(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(runtime_dir / "door"))
    door = Door(runtime_dir / "door")
    transport.connect(runtime_dir / "door", time.monotonic() + SECONDS).close()
    door.close()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_mode_is_no_matter_of_the_umask_which_stays(runtime_dir: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        door = Door(runtime_dir / "door", mode=0o660)
        assert stat.S_IMODE((runtime_dir / "door").stat().st_mode) == 0o660
        assert os.umask(mask) == mask
        door.close()
    finally:
        os.umask(before)


def test_nothing_is_left_of_one_that_cannot_be(runtime_dir: Path) -> None:
    before, mask = opened(), os.umask(0o027)
    for path in (runtime_dir / "none" / "door", runtime_dir / ("x" * 200)):
        with pytest.raises(OSError, match=r"No such file|too long"):
            Door(path, mode=0o600)
    (runtime_dir / "door").mkdir()
    with pytest.raises(OSError, match="directory"):
        Door(runtime_dir / "door")
    assert os.umask(mask) == 0o027
    assert opened() == before


@pytest.fixture
def door(runtime_dir: Path) -> Iterator[Door]:
    made = Door(runtime_dir / "door")
    yield made
    made.close()


@contextlib.contextmanager
def waiting(path: Path) -> Iterator[socket.socket]:
    """Somebody who wants to be let in."""
    with transport.connect(path, time.monotonic() + SECONDS) as client:
        yield client


def test_without_a_descriptor_it_looks_away_for_a_moment_and_lets_them_in_then(
    door: Door, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.2)
    assert door.due() == math.inf
    with waiting(runtime_dir / "door") as client:
        for _ in range(3):
            assert select.select([door], [], [], SECONDS)[0]
            with descriptors(0):
                assert [key.fileobj for key in door.ready()] == [door.listener]
                began = time.monotonic()
                assert door.accept() is None
                assert began < door.due() <= time.monotonic() + 0.2
                assert not select.select([door], [], [], 0)[0]
                assert door.ready() == []
            time.sleep(max(0.0, door.due() - time.monotonic()))
            assert [key.fileobj for key in door.ready()] == [door.listener]
            assert door.due() == math.inf
        with door.accept() or pytest.fail("nobody came") as guest:
            client.send(b"word")
            assert guest.recv(10) == b"word"
    assert capsys.readouterr().err.count("nobody can be let in") == 1


@pytest.mark.parametrize(
    ("number", "pauses"),
    [(errno.ENFILE, True), (errno.ENOMEM, True), (errno.ENOBUFS, True), (errno.ECONNABORTED, False)],
)
def test_what_it_pauses_for(door: Door, monkeypatch: pytest.MonkeyPatch, number: int, pauses: bool) -> None:
    class Listener:
        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> None:
            raise OSError(number, os.strerror(number))

    listener = door.listener
    monkeypatch.setattr(door, "listener", Listener())
    assert door.accept() is None
    assert (door.due() < math.inf) is pauses


def test_one_that_is_closed_in_a_pause_leaves_nothing(runtime_dir: Path) -> None:
    before = opened()
    door = Door(runtime_dir / "door")
    with waiting(runtime_dir / "door"):
        with descriptors(0):
            assert door.accept() is None
        door.close()
    assert not (runtime_dir / "door").exists()
    assert opened() == before


def test_whoever_has_a_door_comes_back_from_it_without_a_descriptor(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is readable again only when there is somebody to hear."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(contextlib.closing(Channel(runtime_dir / "channel", 1)))
        control = Control(runtime_dir / "control", lambda _: Reply(True, "", None))
        stack.enter_context(contextlib.closing(control))
        receiver = stack.enter_context(Receiver())
        owners = [
            (channel, channel.take, runtime_dir / "channel"),
            (control, control.attend, runtime_dir / "control"),
            (receiver, receiver.take, receiver.path),
        ]
        for owner, hear, path in owners:
            with waiting(path) as client:
                assert select.select([owner], [], [], SECONDS)[0]
                with descriptors(0):
                    assert not hear()
                assert not select.select([owner], [], [], 0)[0]
                until = owner.due()
                assert until < math.inf
                time.sleep(max(0.0, until - time.monotonic()))
                assert not hear()
                assert owner.due() == math.inf
                client.send(b"no message")
                assert select.select([owner], [], [], SECONDS)[0]  # it is heard
