"""Processes by their real /proc: engines below a server, numbers that were used again, and secrets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.monitor import made
from tests.unit.monitor.made import eventually
from weightcache.commands import shown
from weightcache.monitor import processes as module
from weightcache.monitor.processes import Processes

# A server starts a controller, the controller a scheduler, which says its number and maps memory that is not its own.
SCHEDULER = """
import mmap, os, time
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
print(os.getpid(), flush=True)
time.sleep(60)
"""
CONTROLLER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SCHEDULER!r}])"
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CONTROLLER!r}])"


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[int]:
    """A process, and the number that it or a descendant says."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    family = [psutil.Process(child.pid)]
    try:
        pid = int(child.stdout.readline())
        family += family[0].children(recursive=True)
        yield pid
    finally:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        child.wait()
        child.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, list[str]]]:
    """A scheduler's number, and the command of the server that is its grandparent."""
    script = tmp_path / "launch_server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), "--port", "30001", "--api-key", "hunter2"]
    with running(command) as pid:
        yield pid, command


def test_an_engine(server: tuple[int, list[str]]) -> None:
    pid, command = server
    processes = Processes()
    [found] = processes.engines([made.lease(pid, since=time.time())])
    assert found.launch.argv == tuple(command)
    assert found.engine.launch == found.launch.text == shown(command)
    assert "hunter2" not in found.engine.launch
    assert (found.engine.pid, found.engine.running, found.engine.waiting) == (pid, None, None)
    assert abs(found.engine.started - time.time()) < 30
    # Its 64 MiB of shared memory are not its own.
    assert psutil.Process(pid).memory_info().rss > 64 << 20 > found.engine.resident > 0


def test_command_lines_are_read_once(server: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    lease = made.lease(server[0], since=time.time())
    first = processes.engines([lease])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: pytest.fail("read again"))
    [again] = processes.engines([lease])
    assert again.launch is first[0].launch
    processes.engines([])
    monkeypatch.undo()
    assert processes.engines([lease])[0].launch == first[0].launch


def test_an_engine_without_a_server() -> None:
    with running([sys.executable, "-c", SCHEDULER]) as pid:
        [found] = Processes().engines([made.lease(pid, since=time.time())])
        assert (found.engine.pid, found.engine.launch, found.launch.argv) == (pid, "", ())


def test_two_leases_of_one_process_are_one_engine() -> None:
    leases = [made.lease(os.getpid(), since=time.time()), made.lease(os.getpid(), since=time.time())]
    assert len(Processes().engines(leases)) == 1


def test_a_number_that_was_used_again_is_no_engine() -> None:
    own = psutil.Process().create_time()
    late = made.lease(os.getpid(), since=own - module.SLACK_SECONDS - 1)
    assert Processes().engines([late]) == ()
    assert len(Processes().engines([made.lease(os.getpid(), since=own - module.SLACK_SECONDS + 1)])) == 1
    renewed = made.lease(os.getpid(), since=own + 1)
    assert len(Processes().engines([late, renewed])) == 1


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31, 2**63, 2**70])
def test_numbers_of_nobody(pid: int) -> None:
    assert Processes().engines([made.lease(pid)]) == ()
    assert Processes().command(pid) == ""


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert Processes().engines([made.lease(child.pid, since=time.time())]) == ()
    finally:
        child.wait()


@pytest.mark.parametrize("error", [psutil.AccessDenied(), psutil.NoSuchProcess(1), PermissionError(), ValueError()])
@pytest.mark.parametrize("query", ["create_time", "memory_info", "cmdline", "parent"])
def test_what_nobody_may_look_at(monkeypatch: pytest.MonkeyPatch, query: str, error: Exception) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, query, fail)
    found = Processes().engines([made.lease(os.getpid(), since=time.time())])
    assert [one.launch.argv for one in found] == ([] if query in ("create_time", "memory_info") else [()])
    assert Processes().command(os.getpid()) == "" or query in ("memory_info", "parent")


def test_commands_of_others() -> None:
    processes = Processes()
    assert processes.command(os.getpid()) == shown(psutil.Process().cmdline())
    assert processes.command(os.getpid()) == shown(psutil.Process().cmdline())


def test_a_process_without_a_command_line_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: [])
    monkeypatch.setattr(psutil.Process, "name", lambda _: "kworker/0:1")
    assert Processes().command(os.getpid()) == "kworker/0:1"


def test_a_title_leaves_the_rest_of_the_arguments_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["sglang::scheduler", *[""] * 100])
    assert Processes().command(os.getpid()) == "sglang::scheduler"


@pytest.mark.parametrize(
    ("command", "is_server"),
    [
        (["/opt/bin/python", "-m", "sglang.launch_server", "--port", "1"], True),
        (["/opt/bin/python", "-X", "dev", "-m", "weightcache.launch", "--model-path", "m"], True),
        (["/opt/bin/python", "/opt/bin/wcache-launch", "--model-path", "m"], True),
        (["/opt/bin/python", "/opt/bin/sglang", "serve", "m"], True),
        (["sglang::scheduler_TP0"], False),
        (["python", "-m", "pytest", "a", "b", "c", "d", "e", "f", "sglang.launch_server"], False),
        (["/bin/sh", "-c", "serve"], False),
        ([], False),
    ],
)
def test_what_a_server_is(command: list[str], is_server: bool) -> None:
    assert module._is_server(command) is is_server
