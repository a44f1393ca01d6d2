"""Restart mode: what ends by itself is started again, and what was told to end ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.launch.support import GOOD, alive, eventually, free_port
from weightcache.launch import processes, restart

CODE = "import sys; from weightcache.launch import main, restart; restart.FIRST_PAUSE = {pause}; {more}"


@pytest.fixture
def restarting(launcher):
    """Starts the launcher in restart mode, without warm workers; ``more`` is Python that runs before it."""

    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, pause: float = 0.05, more: str = "pass") -> subprocess.Popen[str]:
        code = f"{CODE.format(pause=pause, more=more)}; raise SystemExit(main.main(sys.argv[1:]))"
        options = ["--wcache-restart", "--wcache-without", "workers,caches", "--model-path", "m"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *options, *arguments],
            env=launcher.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=launcher.directory,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def finished(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, list[str]]:
    _, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    return process.returncode, [line[13:] for line in err.splitlines() if line.startswith("weightcache: ")]


def serving(launcher, process: subprocess.Popen[str], run: int) -> int:
    """Wait for the run of that number to listen; its process."""
    assert eventually(lambda: (launcher.directory / f"run-{run}.json").exists(), 30)
    pid = int(launcher.runs[run]["pid"])
    assert eventually(lambda: any("socket" in str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir()), 30)
    return pid


def test_engines_that_die_before_they_serve_are_given_up(launcher, restarting, agent):
    agent()
    launcher.script(*GOOD, ["exit", 5])
    status, lines = finished(restarting())
    assert status == 5
    assert len(launcher.runs) == restart.MOST_DEATHS == 5
    again = [line for line in lines if "starting it again" in line]
    assert [line.rpartition("(")[2] for line in again] == [
        "1 restart so far)", "2 restarts so far)", "3 restarts so far)", "4 restarts so far)",
    ]  # fmt: skip
    assert lines[-1].startswith("the engine ended with status 5 after ")
    assert lines[-1].endswith(", 5 times in a row before it served: giving up")


def test_each_start_decides_anew_and_its_agents_are_asked_again(launcher, restarting, agent):
    first = agent()
    launcher.script(*GOOD, ["exit", 5])
    finished(restarting())
    assert len({run["env"]["WEIGHTCACHE_DIRECTIVE"] for run in launcher.runs}) == 5
    assert len(first.seen) >= 5


def test_an_engine_killed_by_a_signal_gives_the_launcher_its_status(launcher, restarting, agent):
    agent()
    launcher.script(*GOOD, ["die", "SIGKILL"])
    status, lines = finished(restarting())
    assert status == -signal.SIGKILL
    assert lines[-1].startswith("the engine was killed by SIGKILL after ")


def test_options_that_cannot_work_are_not_tried_again(launcher, restarting, agent):
    agent()
    launcher.script(["ready", "main"], ["exit", 2])
    status, lines = finished(restarting())
    assert status == 2
    assert len(launcher.runs) == 1
    assert lines[-1].endswith("its options cannot work, so it is not started again")


def test_an_interpreter_that_is_not_there_for_a_while_is_waited_for(launcher, restarting, agent):
    """As while its environment is made anew. It counts for no death, however often it is looked for."""
    agent()
    python = launcher.directory / "python"
    python.symlink_to(sys.executable)
    launcher.script(*GOOD, ["mark", "up"], ["wait", "go"], ["exit", 5])
    process = restarting("--wcache-python", str(python))
    launcher.wait_for("up")
    python.unlink()
    (launcher.directory / "up").unlink()
    (launcher.directory / "go").touch()
    assert process.stderr is not None
    missing: list[str] = []
    while len(missing) <= restart.MOST_DEATHS:
        line = process.stderr.readline()
        assert line, "the launcher ended"
        if "cannot be started" in line:
            missing.append(line)
    assert f"the engine cannot be started: {python} cannot be started (No such file or directory)" in missing[0]
    (launcher.directory / "go").unlink()
    python.write_text("a script that nobody may execute yet")
    while "Permission denied" not in line:
        line = process.stderr.readline()
        assert line, "the launcher ended"
    python.unlink()
    python.symlink_to(sys.executable)
    launcher.wait_for("up")
    process.terminate()
    assert finished(process)[0] == -signal.SIGTERM


def test_an_interpreter_that_never_was_there_is_a_mistake(launcher, restarting, agent):
    agent()
    status, lines = finished(restarting("--wcache-python", str(launcher.directory / "none")))
    assert status == 2
    assert "none cannot be started (No such file or directory)" in "".join(lines)
    assert "starting it again" not in "".join(lines)


@pytest.mark.parametrize(("times", "seconds"), [(0, 0), (1, 1), (2, 2), (5, 16), (6, 30), (5000, 30)])
def test_pauses_grow_up_to_a_limit(times, seconds):
    assert restart._pause(times) == seconds


def test_who_served_may_die_as_often_as_it_likes(launcher, restarting, agent):
    agent()
    port = free_port()
    launcher.script(*GOOD, ["milestone", "serving"], ["listen"], ["sleep", 60])
    process = restarting("--port", str(port), more="restart.ATTEND_SECONDS = 0.05")
    for run in range(restart.MOST_DEATHS + 2):
        pid = serving(launcher, process, run)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
    serving(launcher, process, restart.MOST_DEATHS + 2)
    process.terminate()
    status, lines = finished(process)
    assert status == -signal.SIGTERM
    assert "giving up" not in "".join(lines)
    assert [line for line in lines if line.startswith("the engine")][-1].endswith(
        "starting it again (7 restarts so far)"
    )


def test_one_that_listens_but_never_serves_is_given_up(launcher, restarting, agent):
    """Its warm-up fails, for instance."""
    agent()
    launcher.script(*GOOD, ["listen"], ["sleep", 0.5], ["exit", 5])
    status, lines = finished(restarting("--port", str(free_port()), more="restart.ATTEND_SECONDS = 0.05"))
    assert status == 5
    assert lines[-1].endswith(", 5 times in a row before it served: giving up")


def test_one_that_does_not_say_when_it_serves_has_served_after_a_while(launcher, restarting, agent):
    agent()
    launcher.script(*GOOD, ["listen"], ["sleep", 0.5], ["exit", 5])
    more = "restart.ATTEND_SECONDS = 0.05; restart.SERVED_SECONDS = 0.2"
    process = restarting("--port", str(free_port()), more=more)
    launcher.wait_for(f"run-{restart.MOST_DEATHS + 1}.json")
    process.terminate()
    finished(process)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_ends_launcher_and_engine(launcher, restarting, agent, name):
    agent()
    launcher.script(*GOOD, ["catch", name], ["mark", "serving"], ["wait", f"caught-{name}"], ["exit", 9])
    process = restarting()
    launcher.wait_for("serving")
    process.send_signal(getattr(signal, name))
    assert finished(process)[0] == 9
    assert len(launcher.runs) == 1


def test_a_signal_while_it_waits_ends_the_launcher(launcher, restarting, agent):
    agent()
    launcher.script(*GOOD, ["exit", 5])
    process = restarting(pause=60)
    launcher.wait_for("run-0.json")
    assert process.stderr is not None
    while "starting it again in 30 s" not in (line := process.stderr.readline()):
        assert line, "the launcher ended"
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


def test_the_next_engine_waits_for_what_the_last_one_left(launcher, restarting, agent):
    """A process that outlives its main process may hold GPU memory: it ends, or is killed, first."""
    agent()
    launcher.script(*GOOD, ["child"], ["exit", 5])
    process = restarting(more="restart.GONE_SECONDS = 0.5; restart.MOST_DEATHS = 2")
    child = int(launcher.wait_for("child").read_text())
    assert eventually(lambda: (launcher.directory / "run-1.json").exists(), 30)
    assert not alive(child)
    assert finished(process)[0] == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--wcache-restart=yes"], "takes no value"),
        (["--wcache-restart", "--weight-cache-mode", "off"], "--wcache-restart does not go with --weight-cache-mode"),
        (["--wcache-restart", "--wcache-explain"], "--wcache-restart does not go with --wcache-explain"),
    ],
)
def test_what_it_does_not_go_with(launcher, arguments, reason):
    status, _, err = launcher.run(*arguments, "--model-path", "m")
    assert status == 2
    assert reason in err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (125, "2 min 5 s"), (11_520, "3 h 12 min"), (180_000, "2 d 2 h")],
)
def test_times_are_told_in_two_units(seconds, text):
    assert restart.lasted(seconds) == text


def test_ends_are_named():
    assert restart.ended(-9) == "was killed by SIGKILL"
    assert restart.ended(-200) == "was killed by signal 200"
    assert restart.ended(0) == "ended with status 0"


def test_children_and_strays_are_told_apart():
    old = subprocess.Popen(["sleep", "60"])
    strays = processes.Strays()
    own, stray = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    try:
        assert {old.pid, own.pid, stray.pid} <= processes.children(os.getpid())
        assert strays.reap({own.pid}) == {stray.pid}
        assert strays.end({own.pid}, 0.1, 5)
        assert not alive(stray.pid)
        assert alive(old.pid)
        assert alive(own.pid)
    finally:
        for process in (old, own, stray):
            process.kill()
            process.wait()
