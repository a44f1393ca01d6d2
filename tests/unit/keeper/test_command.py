"""How the keeper starts, restarts and ends its command."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.keeper.harness import KEEPER, PROBE, PYTHON, Rig, eventually, reaped
from weightcache import keeper


def inherited_ignored() -> int:
    """What this process was started with ignored, without the two signals that every Python ignores for itself."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("SigIgn"))
    return int(line.split()[1], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_the_command_gets_what_it_should_and_nothing_else(rig: Rig) -> None:
    stray, other = os.pipe()
    os.set_inheritable(stray, True)
    foreign = dict.fromkeys(keeper.MANAGER_VARIABLES, "1")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    rig.start(
        "--name=door",
        environment=foreign | {"MINE": "yes: mine"},
        close_fds=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, limit[1]), limit[1])),
    )
    os.close(stray)
    os.close(other)
    state = rig.ready()
    for count in range(3):
        passed = {name: value for name, value in state["environment"].items() if name in keeper.MANAGER_VARIABLES}
        rest = {name: value for name, value in state["environment"].items() if name not in passed}
        assert rest == rig.environment | {"MINE": "yes: mine"}
        assert passed["LISTEN_PID"] == str(state["pid"])
        assert passed["LISTEN_FDS"] == str(1 + count)
        assert sorted(passed) == ["FDSTORE", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET"]
        assert state["names"] == ["door"] + ["x"] * count
        assert state["inherited"] == list(range(4 + count))
        assert state["group"] == state["pid"]
        assert state["parent"] == rig.process.pid
        assert state["soft"] == min(1000, limit[1])
        assert state["SigBlk"] == 0
        interpreter = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
        assert not state["SigIgn"] & ~(interpreter | inherited_ignored())
        rig.ask("store", "x", ["1"])
        state = rig.kill()


def test_it_starts_again_whatever_the_end_was(rig: Rig) -> None:
    rig.start()
    rig.ready()
    for status in (0, 78, 3):
        with rig.connect() as sock:
            sock.send(f'["_exit", {status}]'.encode())
            assert sock.recv(1) == b""
        rig.state()
        assert f"ended: exit status {status}\n" in rig.text()
    assert rig.text().count("keeper: starting ") == 4


def test_what_a_killed_command_leaves_is_killed(rig: Rig) -> None:
    rig.start()
    rig.ready()
    pid = rig.ask("leftover")
    rig.kill()
    eventually(lambda: reaped(pid))


def test_orphans_are_reaped(rig: Rig) -> None:
    rig.start()
    rig.ready()
    pid, parent = rig.ask("orphan")
    assert parent == rig.process.pid
    eventually(lambda: reaped(pid))
    assert "ended" not in rig.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop(rig: Rig, number: signal.Signals) -> None:
    rig.start()
    pid = rig.ready()["pid"]
    rig.ask("store", "x", ["1"])
    assert rig.stop(number) == 0
    assert reaped(pid)
    assert sorted(path.name for path in rig.folder.iterdir()) == ["log", "run"]
    assert not rig.path.exists()
    text = rig.text()
    assert f"keeper: stopping {sys.executable}\n" in text
    assert text.endswith("keeper: stopped, 1 stored descriptors closed\n")
    assert "a line of the command\n" in text


def test_stop_between_two_starts(rig: Rig) -> None:
    rig.start("--restart-delay", "100")
    os.kill(rig.ready()["pid"], signal.SIGKILL)
    eventually(lambda: "ended" in rig.text())
    assert rig.stop() == 0


def test_a_second_signal_kills(rig: Rig) -> None:
    rig.start()
    pid = rig.ready()["pid"]
    rig.ask("ignore")
    rig.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping" in rig.text())
    rig.state()  # it serves on as long as it likes
    assert rig.stop() == 0
    assert reaped(pid)


def test_a_command_that_does_not_stop_is_killed(rig: Rig) -> None:
    rig.start(keeper=PROBE, environment={"PROBE_SET": '{"STOP_SECONDS": 0.1}'})
    rig.ready()
    rig.ask("ignore")
    pid = rig.ask("leftover")
    assert rig.stop() == 0
    eventually(lambda: reaped(pid))


def test_a_hangup_is_passed_on(rig: Rig) -> None:
    rig.start()
    rig.ready()
    rig.process.send_signal(signal.SIGHUP)
    eventually(lambda: rig.state()["hangups"] == 1)


def test_what_is_ignored_from_the_start_stays_ignored(rig: Rig) -> None:
    rig.start(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    pid = rig.ready()["pid"]
    rig.process.send_signal(signal.SIGINT)
    state = rig.state()
    assert state["pid"] == pid
    assert state["SigIgn"] & 1 << signal.SIGINT - 1


def test_a_command_that_cannot_be_started_is_tried_again_more_and_more_slowly(rig: Rig) -> None:
    command = rig.folder / "command"
    delays = '{"FIRST_EXEC_DELAY": 0.01, "LONGEST_EXEC_DELAY": 0.15}'
    rig.start(command=[str(command)], keeper=PROBE, environment={"PROBE_SET": delays})
    sentence = f"keeper: cannot start {command}: No such file or directory\n"
    eventually(lambda: rig.text().count(sentence) == 5)
    begin = time.monotonic()
    eventually(lambda: rig.text().count(sentence) == 8)
    assert 0.5 < time.monotonic() - begin < 5
    command.write_text(f'#!/bin/sh\nexec {" ".join(PYTHON)} "{Path(__file__).with_name("fake_agent.py")}"\n')
    eventually(lambda: f"keeper: cannot start {command}: Permission denied\n" in rig.text())
    command.chmod(0o755)
    assert rig.ready()["names"] == ["agent"]
    assert "ended" not in rig.text()


def test_no_memory_for_a_fork_is_no_end(rig: Rig) -> None:
    rig.start(keeper=PROBE, environment={"PROBE_FORKS": "3"})
    rig.ready()
    assert rig.text().count("Cannot allocate memory") == 3


def test_an_error_that_nobody_thought_of_is_no_end(rig: Rig) -> None:
    rig.start(keeper=PROBE)
    pid = rig.ready()["pid"]
    rig.ask("store", "x", ["1"])
    rig.process.send_signal(signal.SIGURG)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: reaped(pid))
    assert rig.state()["contents"] == {"x": ["1"]}
    assert rig.text().count("keeper: internal error: MemoryError: none left\n") == 3


@pytest.mark.parametrize(("options", "mode"), [([], 0o660), (["--mode", "0600", "--group", str(os.getgid())], 0o600)])
def test_the_socket(rig: Rig, options: list[str], mode: int) -> None:
    rig.start(*options, umask=0o077)
    rig.ready()
    found = rig.path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_gid == os.getgid()


def test_nothing_happens_to_what_is_put_in_the_place_of_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path, lstat = tmp_path / "victim", tmp_path / "s", Path.lstat
    victim.touch(0o600)

    def swapped(where: Path) -> os.stat_result:
        """What is there, and then another user's link."""
        found = lstat(where)
        if where == path and stat.S_ISSOCK(found.st_mode):
            path.unlink()
            path.symlink_to(victim)
        return found

    monkeypatch.setattr(Path, "lstat", swapped)
    with contextlib.ExitStack() as stack:
        keeper.bind(stack, path, "0666", str(os.getgid()))
        assert path.is_symlink()
        assert stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_socket_that_nobody_answers_on_is_replaced_and_another_is_not(rig: Rig) -> None:
    rig.path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(rig.path))
    rig.start()
    pid = rig.ready()["pid"]
    rig.start()
    assert rig.process.wait(10) == 1
    assert f"keeper: cannot listen at {rig.path}: somebody answers there (connected)\n" in rig.text()
    rig.keepers.pop()
    assert rig.state()["pid"] == pid
    rig.path.unlink()
    rig.path.write_text("of somebody else")
    assert rig.stop() == 0
    assert rig.path.read_text() == "of somebody else"


def test_what_cannot_be_listened_on_is_said_and_stays_as_it_is(rig: Rig) -> None:
    rig.path.parent.mkdir()
    rig.path.write_text("precious")
    rig.start()
    assert rig.process.wait(10) == 1
    assert rig.path.read_text() == "precious"
    rig.path.unlink()
    for options in (["--group", "no such group"], ["--mode", "9"]):
        rig.start(*options)
        assert rig.process.wait(10) == 1
        assert not rig.path.exists()
    assert rig.text().count(f"keeper: cannot listen at {rig.path}: ") == 3
    assert "Traceback" not in rig.text()


def test_without_a_listener_and_through_wcache(rig: Rig) -> None:
    wcache = [sys.executable, "-m", "weightcache.cli", "keeper", "--store-max=7", "--"]
    script = 'echo "$FDSTORE ${LISTEN_FDS-none} $@"; grep SigIgn /proc/self/status'
    rig.run([*wcache, "sh", "-c", script, "sh", "--", "-x", "--mode"])
    eventually(lambda: f"7 none -- -x --mode\nSigIgn:\t{inherited_ignored():016x}\n" in rig.text())
    arguments = Path(f"/proc/{rig.process.pid}/cmdline").read_bytes().split(b"\0")
    assert arguments[1:3] == [b"-I", b"-S"]
    assert rig.stop() == 0


def test_it_imports_the_standard_library_only(rig: Rig) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(keeper.__file__).parent)!r}); import keeper; print(*sys.modules)"
    )
    shown = subprocess.run([*PYTHON, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    names = {name.partition(".")[0] for name in shown.stdout.split()} - {"__main__", "keeper"}
    assert names <= set(sys.stdlib_module_names) | {"__mp_main__"}


@pytest.mark.parametrize("options", [["--name", "a:b"], ["--name="], ["--store-max", "x"], []])
def test_a_command_line_that_makes_no_sense(options: list[str]) -> None:
    command = [] if not options else ["--", "true"]
    shown = subprocess.run([*KEEPER, *options, *command], capture_output=True, text=True, timeout=30, check=False)
    assert shown.returncode == 2
    assert "wcache keeper: error: " in shown.stderr


def test_it_sleeps_while_nothing_happens(rig: Rig) -> None:
    rig.start()
    rig.ready()
    rig.ask("pipe", "hung up", "FDPOLL=0")
    rig.kill()
    rig.ask("pipe", "dropped", "")
    time.sleep(0.1)
    before = switches(rig.process.pid)
    time.sleep(0.3)
    assert switches(rig.process.pid) == before


def switches(pid: int) -> list[str]:
    """How often the threads of a process were switched to."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return [line for line in lines if "ctxt_switches" in line]
