"""What a launch records of its start, and says when its server serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.launch.support import ATTACHED, GOOD, Launcher, eventually
from weightcache.starts import phases, reading
from weightcache.starts.reading import Start

FAILED = {"rank": 0, "role": "target", "outcome": "failed", "code": "attach-failed", "message": "no memory"}
MAIN = ["trace", "process", "main", "cold"]
SERVING = [["milestone", "warm-up token"], ["milestone", "serving"], ["sleep", 0.5]]


def starts(launcher: Launcher) -> list[Start]:
    return list(reading.newest_first(Path(launcher.environment["WEIGHTCACHE_STATE_DIR"]) / "starts"))


def test_a_start_is_recorded_and_told_on_one_line(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, ["trace", "begin", "kv", ""], ["sleep", 0.3], ["trace", "end", "kv", ""], *SERVING)
    secret = ["--api-key", "hunter2", "--port", "1234"]
    status, _, err = launcher.run("--model-path", "/models/a", "--tp", "1", *secret)
    assert status == 0
    (start,) = starts(launcher)
    assert err.splitlines()[1:] == [f"weightcache: {phases.sentence(start)}"]
    assert re.match(
        r"serving after [\d.]+ s \(first token after [\d.]+ s\): launcher [\d.]+, .*kv 0\.[3-9]",
        err[err.index("serving") :],
    )
    assert start.header is not None
    assert start.header.model == "/models/a"
    assert start.header.arguments == ("--model-path", "/models/a", "--tp", "1")
    assert (start.how, start.outcome, start.status, start.live, start.damaged) == ("cold", "attached", 0, False, 0)
    assert start.weights[0].milliseconds == ATTACHED["milliseconds"]


def test_a_phase_that_became_slower_is_named(launcher, agent):
    agent()
    for seconds in (0.1, 1.5, 1.5):
        launcher.script(
            *GOOD, MAIN, ["trace", "begin", "kv", ""], ["sleep", seconds], ["trace", "end", "kv", ""], *SERVING
        )
        _, _, err = launcher.run("--model-path", "/models/a")
        found = re.search(r"weightcache: slower than start 1: kv ([\d.]+) s \(was ([\d.]+)\); (.+)", err)
        assert bool(found) == (seconds == 1.5 and len(starts(launcher)) == 2), err
        if found:
            assert found[3] == "`wcache starts show 2` draws it"


def test_without_a_warm_up_the_first_token_is_told_when_it_comes(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, ["milestone", "serving"], ["sleep", 0.3], ["milestone", "first token"], ["sleep", 0.5])
    _, _, err = launcher.run("--model-path", "/models/a")
    serving, token = err.splitlines()[1:]
    assert re.fullmatch(r"weightcache: serving after [\d.]+ s: .+", serving)
    assert re.fullmatch(r"weightcache: first token after [\d.]+ s", token)


def test_with_a_warm_up_a_clients_first_token_is_no_news(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, *SERVING, ["milestone", "first token"], ["sleep", 0.5])
    _, _, err = launcher.run("--model-path", "/models/a")
    assert len(err.splitlines()) == 2
    (start,) = starts(launcher)
    assert start.point("first token") is not None


def test_attaching_that_failed_and_the_start_from_disk_are_one_start(launcher, agent):
    agent()
    disk = {"rank": 0, "role": "target", "outcome": "disk", "message": "no memory"}
    launcher.script(
        ["ready", "main"], ["ready", "scheduler"], MAIN, ["decision", FAILED], ["exit", 1],
        again=[["ready", "main"], ["ready", "scheduler"], MAIN, ["decision", disk], *SERVING],
    )  # fmt: skip
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0, err
    (start,) = starts(launcher)
    assert [process.attempt for process in start.processes] == [1, 2]
    assert [entry.outcome for entry in start.weights] == ["failed", "disk"]
    assert start.outcome == "disk"
    assert "failed attempt" in phases.phases(start)


def test_a_server_that_was_killed(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, ["die", "SIGKILL"])
    launcher.run("--model-path", "/models/a")
    (start,) = starts(launcher)
    assert (start.status, start.live) == (-9, False)


def test_a_launcher_that_was_killed_leaves_a_start_that_is_lost(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, ["mark", "there"], ["sleep", 30])
    with launcher.start("--model-path", "/models/a") as process:
        launcher.wait_for("there")
        assert starts(launcher)[0].live
        process.kill()
    assert eventually(lambda: not starts(launcher)[0].live)
    assert starts(launcher)[0].status is None


@pytest.mark.parametrize("reason", ["a file", "no such file system"])
def test_no_place_for_a_trace_costs_one_line_and_no_start(launcher, agent, reason):
    agent()
    launcher.script(*GOOD, MAIN, *SERVING)
    if reason == "a file":
        (launcher.directory / "file").write_text("")
        launcher.environment["WEIGHTCACHE_STATE_DIR"] = str(launcher.directory / "file")
    else:
        launcher.environment["WEIGHTCACHE_STATE_DIR"] = "/proc/none"
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0
    first, *_, last = err.splitlines()
    assert first.startswith("weightcache: this start leaves no trace: ")
    assert re.fullmatch(r"weightcache: serving after [\d.]+ s", last)


def test_a_trace_of_rubbish_costs_nothing_but_itself(launcher, agent):
    agent()
    folder = Path(launcher.environment["WEIGHTCACHE_STATE_DIR"]) / "starts"
    folder.mkdir(parents=True, mode=0o700)
    rubbish = bytes(range(256)) * 50
    (folder / "000041.jsonl").write_bytes(rubbish)
    launcher.script(*GOOD, MAIN, *SERVING)
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0
    assert "serving after" in err
    assert (folder / "000041.jsonl").read_bytes() == rubbish
    assert [start.number for start in starts(launcher)] == [42, 41]


def test_two_launches_at_once_have_a_trace_each(launcher, agent):
    agent()
    launcher.script(*GOOD, MAIN, *SERVING)
    running = [launcher.start("--model-path", f"/models/{number}") for number in range(2)]
    for process in running:
        with process:
            _, err = process.communicate(timeout=30)
            assert err.count("serving after") == 1, err
    found = starts(launcher)
    assert sorted(start.header.model for start in found) == ["/models/0", "/models/1"]
    assert all(len(start.processes) == 1 and start.status == 0 and not start.damaged for start in found)
