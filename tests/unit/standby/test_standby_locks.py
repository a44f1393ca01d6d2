"""Locks of processes that die: by a real SIGKILL, with forked and executed children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightcache.errors import WeightcacheError
from weightcache.standby.locks import ByteLock, is_taken


@contextlib.contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that says when ``work`` is done, and then waits to be killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work()
            os.write(writing, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"1"
        yield pid
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def test_a_byte_has_one_owner_and_the_others_are_free(tmp_path: Path) -> None:
    path = tmp_path / "e.lock"
    first, second, other = ByteLock(path, 0), ByteLock(path, 0), ByteLock(path, 1)
    assert (first.try_take(), second.try_take(), other.try_take()) == (True, False, True)
    assert (first.held, second.held, other.held) == (True, False, True)
    assert (is_taken(path, 0), is_taken(path, 1), is_taken(path, 2)) == (True, True, False)
    first.give_back()
    assert not first.held
    assert second.try_take()
    for lock in (first, second, other):
        lock.close()
        lock.close()
    assert not is_taken(path, 0)
    assert not is_taken(path, 1)


@pytest.mark.parametrize(("byte", "count", "taken"), [(0, 5, False), (0, 6, True), (5, 1, True), (6, 1000, False)])
def test_many_bytes_are_asked_for_at_once(tmp_path: Path, byte: int, count: int, taken: bool) -> None:
    path = tmp_path / "e.lock"
    lock = ByteLock(path, 5)
    with contextlib.closing(lock):
        lock.take()
        assert is_taken(path, byte, count) is taken
    assert not is_taken(path, byte, count)


def test_no_file_is_nobodys(tmp_path: Path) -> None:
    assert not is_taken(tmp_path / "none.lock", 0)
    assert not (tmp_path / "none.lock").exists()


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_the_file_keeps_its_content_its_place_and_its_mode(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "e.lock"
    mask = os.umask(umask)
    try:
        ByteLock(path, 0).close()
    finally:
        os.umask(mask)
    path.write_bytes(b"kept")
    before = path.stat()
    lock = ByteLock(path, 0)
    lock.take()
    lock.close()
    assert path.read_bytes() == b"kept"
    assert (path.stat().st_ino, path.stat().st_mode & 0o777) == (before.st_ino, 0o660)


def test_sigkill_of_the_owner_wakes_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "e.lock"
    with child(lambda: ByteLock(path, 0).take()) as pid:
        lock = ByteLock(path, 0)
        assert not lock.try_take()
        taken: list[float] = []

        def wait() -> None:
            lock.take()
            taken.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        waiter.join(10)
        assert not waiter.is_alive()
        assert taken[0] - killed < 1
        assert lock.held
        lock.close()


def test_a_forked_helper_keeps_the_lock_of_a_dead_owner_until_it_closes(tmp_path: Path) -> None:
    path, helper = tmp_path / "e.lock", tmp_path / "helper"

    def work() -> None:
        lock = ByteLock(path, 0)
        lock.take()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGUSR1, lambda *_: lock.close())
            helper.write_text(str(os.getpid()))
            while lock.held:
                signal.pause()
            os._exit(0)
        _until(helper.exists)

    with child(work) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lock = ByteLock(path, 0)
        assert not lock.try_take()
        os.kill(int(helper.read_text()), signal.SIGUSR1)
        _until(lock.try_take)
        lock.close()


def test_an_executed_helper_does_not_keep_it(tmp_path: Path) -> None:
    path, helper = tmp_path / "e.lock", tmp_path / "helper"

    def work() -> None:
        ByteLock(path, 0).take()
        started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
        helper.write_text(str(started.pid))

    with child(work) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            lock = ByteLock(path, 0)
            assert lock.try_take()
            lock.close()
        finally:
            os.kill(int(helper.read_text()), signal.SIGKILL)


def test_a_wait_goes_on_after_a_signal_and_ends_by_its_handlers_error(tmp_path: Path) -> None:
    path = tmp_path / "e.lock"
    calls: list[int] = []

    def handler(_number: int, _frame: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with child(lambda: ByteLock(path, 0).take()):
            lock = ByteLock(path, 0)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(KeyboardInterrupt):
                lock.take()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(calls) == 2
            assert not lock.held
            lock.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "e.lock"
    (tmp_path / "real").touch()
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(WeightcacheError, match=r"e\.lock"):
        ByteLock(path, 0)
    with pytest.raises(WeightcacheError, match=r"e\.lock"):
        is_taken(path, 0)


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(WeightcacheError, match="none is not there"):
        ByteLock(tmp_path / "none" / "e.lock", 0)


def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
