"""Whether processes are gone: killed, not reaped, with threads, and with a number that another one has."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weightcache.errors import WeightcacheError
from weightcache.standby import fence
from weightcache.standby.messages import Process


def started(code: str = "import signal; print(flush=True); signal.pause()") -> subprocess.Popen[bytes]:
    """A process of Python that has said a line."""
    one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert one.stdout.readline() == b"\n"
    return one


def end(one: subprocess.Popen[bytes]) -> None:
    one.kill()
    one.communicate()


def test_a_process_is_told_by_its_start() -> None:
    one = started()
    try:
        process = fence.identify(one.pid)
        assert process == Process(one.pid, fence.started(one.pid) or 0)
        assert fence.lives(process)
        assert not fence.lives(Process(one.pid, process.started - 1))
        assert not fence.lives(Process(one.pid, process.started + 1))
    finally:
        end(one)
    assert not fence.lives(process)
    assert fence.started(one.pid) is None
    with pytest.raises(WeightcacheError, match="is not there any more"):
        fence.identify(one.pid)


def test_a_name_full_of_parentheses_is_no_obstacle(tmp_path: Path) -> None:
    name = tmp_path / "a) R (b) 1 2"
    name.symlink_to("/bin/sleep")
    one = subprocess.Popen([name, "60"])
    try:
        deadline = time.monotonic() + 10
        while "a) R" not in Path(f"/proc/{one.pid}/comm").read_text():
            assert time.monotonic() < deadline
        mine, other = fence.identify(os.getpid()).started, fence.identify(one.pid).started
        assert mine <= other <= mine + (time.monotonic() + 1) * os.sysconf("SC_CLK_TCK")
    finally:
        one.kill()
        one.wait()


def test_the_living_are_those_that_have_not_ended_and_those_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = started()
    process, me = fence.identify(one.pid), fence.identify(os.getpid())
    later, nobody = Process(one.pid, process.started + 1), Process(2**40, 1)
    try:
        assert fence.living([process, later, me, nobody, process]) == (process, me, nobody)
        one.kill()
        assert fence.wait((process,), 10) == ()
        assert fence.living(iter([process, me])) == (me,)

        def full(_: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "pidfd_open", full)
        assert fence.living([process, me]) == (process, me)
    finally:
        end(one)


def test_who_still_lives_after_the_time_is_named() -> None:
    first, second = started(), started()
    both = [fence.identify(first.pid), fence.identify(second.pid)]
    before = _open_files()
    try:
        first.kill()
        began = time.monotonic()
        assert fence.wait([*both, both[0]], 0.2) == (both[1],)
        assert 0.2 <= time.monotonic() - began < 5
        threading.Timer(0.05, second.kill).start()
        began = time.monotonic()
        assert fence.wait(both, 30) == ()
        assert time.monotonic() - began < 5
    finally:
        end(first)
        end(second)
    assert _open_files() == before - 2  # the pipes of the two


def test_a_time_that_poll_has_no_room_for_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started()
    process = fence.identify(one.pid)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fence, "LONGEST_POLL", 0.01)
            began = time.monotonic()
            assert fence.wait((process,), 0.1) == (process,)
            assert time.monotonic() - began >= 0.1
        threading.Timer(0.05, one.kill).start()
        began = time.monotonic()
        assert fence.wait((process,), 1e12) == ()
        assert time.monotonic() - began < 5
    finally:
        end(one)


def test_nobody_is_waited_for_no_time() -> None:
    assert fence.wait((), 30) == ()
    assert fence.wait((Process(2**22 - 1, 1),), 30) == ()


def test_a_zombie_is_gone() -> None:
    one = started()
    process = fence.identify(one.pid)
    try:
        one.kill()
        assert fence.wait((process,), 10) == ()
        assert fence.started(one.pid) == process.started, "it is not reaped, and still to be seen"
    finally:
        end(one)


def test_a_process_whose_first_thread_has_ended_is_not_gone() -> None:
    one = started(
        "import ctypes, threading, time\n"
        "main = threading.main_thread().ident\n"
        "def work():\n"
        "    text = open('/proc/self/stat').read()\n"
        "    while text.rpartition(')')[2].split()[0] != 'Z':\n"
        "        text = open('/proc/self/stat').read()\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=work).start()\n"
        "ctypes.CDLL(None).syscall(60 if __import__('platform').machine() == 'x86_64' else 93, 0)\n"
    )
    process = fence.identify(one.pid)
    try:
        assert fence.wait((process,), 0.1) == (process,)
        one.kill()
        assert fence.wait((process,), 10) == ()
    finally:
        end(one)


def test_a_number_that_is_a_threads_now_is_nobody() -> None:
    done = threading.Event()
    ids: list[int] = []
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), done.wait(10)))
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not ids:
            assert time.monotonic() < deadline
        assert fence.wait((Process(ids[0], 1),), 0) == ()
    finally:
        done.set()
        thread.join()


def test_who_cannot_be_seen_counts_as_living(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started()
    process = fence.identify(one.pid)
    monkeypatch.setattr(fence, "started", lambda _pid: None)  # as in a /proc that hides other users' processes
    try:
        assert fence.wait((process,), 0.05) == (process,)
        os.kill(one.pid, signal.SIGKILL)
        assert fence.wait((process,), 10) == ()
    finally:
        end(one)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
