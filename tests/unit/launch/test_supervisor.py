"""The launcher is invisible: signals, exit status and process group are the server's."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.descriptors import descriptors
from tests.support.environments import REPOSITORY
from tests.unit.launch.support import ATTACHED, alive, eventually
from weightcache import transport
from weightcache.engine.directive import Decision, encode_report
from weightcache.launch import supervisor

GOOD = [["ready", "main"], ["ready", "scheduler"], ["decision", ATTACHED]]


@pytest.fixture(autouse=True)
def an_agent(agent):
    agent()


@pytest.mark.parametrize("status", [0, 1, 42, 255])
def test_the_exit_status_is_passed_through(launcher, status):
    launcher.script(*GOOD, ["exit", status])
    assert launcher.run("--model-path", "m")[0] == status


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGABRT", "SIGSEGV"])
def test_the_launcher_dies_by_the_servers_signal(launcher, name):
    launcher.script(*GOOD, ["die", name])
    assert launcher.run("--model-path", "m")[0] == -getattr(signal, name)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_signals_are_passed_on(launcher, name):
    launcher.script(*GOOD, ["catch", name], ["mark", "serving"], ["wait", f"caught-{name}"], ["exit", 9])
    process = launcher.start("--model-path", "m")
    launcher.wait_for("serving")
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=20)
    assert process.returncode == 9, err


def test_a_server_that_ends_by_the_passed_signal(launcher):
    launcher.script(*GOOD, ["mark", "serving"], ["sleep", 60])
    process = launcher.start("--model-path", "m")
    launcher.wait_for("serving")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


def test_sigkill_of_the_launcher_ends_the_server(launcher):
    launcher.script(*GOOD, ["mark", "serving"], ["sleep", 60])
    process = launcher.start("--model-path", "m")
    launcher.wait_for("serving")
    server = launcher.runs[0]["pid"]
    assert alive(server)
    process.kill()
    process.communicate(timeout=20)
    assert eventually(lambda: not alive(server))


def test_a_signal_while_starting_is_not_followed_by_a_warning(launcher):
    launcher.script(["mark", "starting"], ["sleep", 60])
    process = launcher.start("--wcache-on-mismatch", "error", "--model-path", "m")
    launcher.wait_for("starting")
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert err == ""


def test_ctrl_c_reaches_the_server_once(launcher):
    """On a terminal both get the signal; passing it on as well would interrupt a server that is shutting down."""
    launcher.script(*GOOD, ["mark", "serving"], ["sleep", 60])
    code = (
        "import sys, signal; n = []; "
        "signal.signal(signal.SIGINT, lambda *_: n.append(1)); open('serving', 'w').close(); "
        "import time; end = time.monotonic() + 2\n"
        "while time.monotonic() < end: time.sleep(0.05)\n"
        "open('count', 'w').write(str(len(n))); sys.exit(3)"
    )
    fake = launcher.directory / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\nexec {sys.executable} -c "$CODE"\n')
    fake.chmod(0o755)
    launcher.environment["CODE"] = code
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launcher.directory)
        command = [sys.executable, "-m", "weightcache.launch", "--wcache-python", "./python", "--model-path", "m"]
        os.execve(sys.executable, command, launcher.environment)
    try:
        launcher.wait_for("serving")
        time.sleep(0.1)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert (launcher.directory / "count").read_text() == "1"
    assert os.waitstatus_to_exitcode(status) == 3


def test_the_server_is_in_the_launchers_process_group(launcher):
    launcher.script(*GOOD, ["mark", "serving"], ["wait", "go"])
    process = launcher.start("--model-path", "m", start_new_session=True)
    launcher.wait_for("serving")
    assert os.getpgid(launcher.runs[0]["pid"]) == os.getpgid(process.pid) == process.pid
    (launcher.directory / "go").touch()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_the_servers_signal_mask_and_streams_are_the_operators(launcher):
    launcher.environment["CODE"] = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), input())"
    fake = launcher.directory / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$CODE"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "weightcache.launch", "--wcache-python", str(fake), "--model-path", "m"],
        env=launcher.environment, input="typed\n", capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.stdout == "set() typed\n"


def test_a_launcher_without_descriptors_hears_who_waits_when_it_has_some_and_rests_meanwhile(launcher):
    launcher.script(*GOOD, ["mark", "serving"], ["wait", "go"])
    process = launcher.start("--model-path", "m")
    launcher.wait_for("serving")
    [path] = launcher.runtime_dir.glob("wcache-launch-*/report")
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, before[1]))
    with transport.connect(path, time.monotonic() + 5) as client:
        transport.send_packet(client, encode_report(Decision(7, "target", "disk", message="a test")))
        client.settimeout(5)
        began = sum(psutil.Process(process.pid).cpu_times()[:2])
        time.sleep(2)
        assert sum(psutil.Process(process.pid).cpu_times()[:2]) - began < 0.5
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        assert client.recv(1) == b""  # taken, while nothing else happens
    (launcher.directory / "go").touch()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "rank 7: loaded from disk: a test" in err


class Poor:
    """A watcher who waits for the server to listen, and a slot whose launcher has no descriptor left once it runs."""

    wants_serving = True

    def __init__(self, fd: int, seconds: float) -> None:
        self.fd = fd
        self.until = time.monotonic() + seconds
        self.without: contextlib.AbstractContextManager[None] | None = None

    def fileno(self) -> int:
        return self.fd

    def due(self) -> float:
        return time.monotonic() + 0.05

    def attend(self) -> float | None:
        if self.without is None:
            self.without = descriptors(0)
            self.without.__enter__()
        return 0.0 if time.monotonic() > self.until else None

    def on_serving(self) -> None:
        raise AssertionError("it does not listen")

    def take(self) -> list:
        return []

    def begin(self) -> None:
        pass

    def killing(self) -> None:
        pass

    def ended(self) -> None:
        assert self.without is not None
        self.without.__exit__(None, None, None)


@pytest.mark.parametrize(("seconds", "lasts", "status"), [(30.0, "1", 0), (1.0, "60", -signal.SIGKILL)])
def test_a_launcher_without_descriptors_waits_for_the_end_of_its_server_or_ends_it(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lasts: str, status: int
) -> None:
    looked: list[list[int]] = []
    listens = supervisor.proof.listens
    monkeypatch.setattr(supervisor.proof, "listens", lambda pids, port: looked.append(pids) or listens(pids, port))
    monkeypatch.setattr(supervisor, "SERVING_POLL", 0.1)
    fds = [os.eventfd(0), os.eventfd(0)]
    aside, receiver = (Poor(fd, seconds) for fd in fds)
    try:
        done = supervisor.run(["sleep", lasts], os.environ, receiver, receiver, 1, aside=aside)
    finally:
        for fd in fds:
            os.close(fd)
    assert done.status == status
    assert len(looked) > 1
    assert {len(pids) for pids in looked} == {1}


class Hung:
    """A slot whose engine hangs, and a receiver of no reports."""

    wants_serving = False

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.said: list[str] = []

    def fileno(self) -> int:
        return self.fd

    def due(self) -> float:
        return time.monotonic()

    def attend(self) -> float:
        return 0.0

    def may_end(self) -> bool:
        return True

    def take(self) -> list:
        return []

    def begin(self) -> None:
        self.said.append("begin")

    def killing(self) -> None:
        self.said.append("killing")

    def ended(self) -> None:
        self.said.append("ended")


def test_a_slot_hears_that_its_engine_is_killed_before_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fds = [os.eventfd(0), os.eventfd(0)]
    aside, receiver = map(Hung, fds)
    strike = supervisor.Tree.strike

    def struck(tree: supervisor.Tree) -> None:
        aside.said.append("kill")
        strike(tree)

    monkeypatch.setattr(supervisor.Tree, "strike", struck)
    try:
        done = supervisor.run(["sleep", "60"], os.environ, receiver, receiver, None, aside=aside)
    finally:
        for fd in fds:
            os.close(fd)
    assert (done.status, done.killed) == (-signal.SIGKILL, True)
    assert aside.said == ["begin", "killing", "kill", "ended"]


def test_a_server_that_no_signal_ends_is_left_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL ends none that waits for a driver."""
    monkeypatch.setattr(supervisor.Tree, "strike", lambda _: None)
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT", 0.3)
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], environment: dict[str, str], _: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, env=environment))
        return started[0]

    fds = [os.eventfd(0), os.eventfd(0)]
    aside, receiver = map(Hung, fds)
    try:
        began = time.monotonic()
        done = supervisor.run(["sleep", "60"], os.environ, receiver, receiver, None, start, aside=aside)
        took = time.monotonic() - began
        assert started[0].poll() is None
    finally:
        for fd in fds:
            os.close(fd)
        for process in started:
            process.kill()
            process.wait(10)
    assert 0.3 <= took < 10
    assert done == supervisor.Ended(-signal.SIGKILL, interrupted=False, killed=True)
    assert aside.said == ["begin", "killing", "ended"]
    assert "some of the server's processes do not end within 0 s" in capfd.readouterr().err


UNKILLABLE = """
import os
from weightcache.launch import supervisor
from weightcache.launch.reports import Receiver
from tests.unit.launch.test_supervisor import Hung
supervisor.Tree.strike = lambda tree: print(tree.root, flush=True)
with Receiver() as receiver:
    hung = Hung(os.eventfd(0))
    done = supervisor.run(["sleep", "60"], dict(os.environ), receiver, hung, None, aside=hung)
print(done.status, done.interrupted, done.killed, flush=True)
"""


def test_a_second_signal_ends_the_launcher_whatever_its_server_does(launcher):
    launcher.environment["PYTHONPATH"] += os.pathsep + os.fspath(REPOSITORY)
    with subprocess.Popen(
        [sys.executable, "-c", UNKILLABLE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=launcher.environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            server = int(process.stdout.readline())
            process.terminate()
            assert "another signal ends the launcher" in process.stderr.readline()
            process.send_signal(signal.SIGWINCH)  # no signal to end
            time.sleep(0.2)
            assert process.poll() is None
            assert alive(server)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert out == f"{-signal.SIGINT} True False\n"
    assert err == "weightcache: some of the server's processes do not end: the launcher ends without them\n"
    assert eventually(lambda: not alive(server))  # it dies with its parent
