"""A door of the launcher: who may come, what was left at its place, and what is left of it."""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from pathlib import Path

import pytest

from weightcache import transport
from weightcache.launch.door import Door

SECONDS = 5.0


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_somebody_comes_and_nothing_waits(runtime_dir: Path) -> None:
    before = descriptors()
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
    assert descriptors() == before


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
    before, mask = descriptors(), os.umask(0o027)
    for path in (runtime_dir / "none" / "door", runtime_dir / ("x" * 200)):
        with pytest.raises(OSError, match=r"No such file|too long"):
            Door(path, mode=0o600)
    (runtime_dir / "door").mkdir()
    with pytest.raises(OSError, match="directory"):
        Door(runtime_dir / "door")
    assert os.umask(mask) == 0o027
    assert descriptors() == before
