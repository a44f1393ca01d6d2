"""wcache-top without a screen: what it prints, how it ends, and what it imports."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor import made
from tests.unit.monitor.made import Watched
from tests.unit.server.harness import Agent
from tests.unit.top.conftest import SCRIPT, Top
from weightcache.cli.main import main as wcache
from weightcache.monitor import view
from weightcache.tui import main as module

LISTING = "\n".join(
    [
        "import sys",
        "from weightcache.tui.main import main",
        "status = main()",
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)",
        "sys.exit(status)",
    ]
)


@pytest.fixture
def ready(runtime_dir: Path) -> Iterator[Watched]:
    with Watched(runtime_dir) as agent:
        yield agent


def status_json(top: Top, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capfd.readouterr()
    wcache([*top.where, "status", "--json"])
    ranks: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["ranks"]
    return ranks


def settled(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is another number a moment later."""
    return [{key: value for key, value in rank.items() if key != "uptime_seconds"} for rank in ranks]


def test_a_table(top: Top, ready: Watched) -> None:
    got = top("--once")
    assert (got.status, got.err) == (0, "")
    header, row, *rest = got.out.splitlines()
    assert header.split()[:4] == ["RANK", "STATE", "GPU", "MODEL"]
    assert row.split()[:4] == ["0", "ready", "host", "/models/small"]
    assert rest[0].startswith("rank 0: set s1abcd (target, version 1) of /models/small")
    assert rest[1].startswith("rank 0: memory of this host: ")


def test_json_has_the_ranks_of_status(top: Top, ready: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    with Watched(top.run, 3) as other:
        other.status = made.status(3, "failed")
        (top.run / "2.json").write_text("{")
        got = top("--json")
        whole = json.loads(got.out)
        assert (got.status, got.err) == (1, "")
        assert next(iter(whole)) == "schema"
        assert whole["schema"] == 1
        assert set(whole) == {
            "schema",
            "at",
            "host",
            "version",
            "driver",
            "problem",
            "ranks",
            "devices",
            "engines",
            "events",
            "standby",
        }
        assert [rank["agent"] for rank in whole["ranks"]] == ["up", "down", "up"]
        assert settled(whole["ranks"]) == settled(status_json(top, capfd))


def test_json_of_a_real_agent(top: Top, agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    agent.configure()
    agent.start()
    agent.load()
    top.config, top.run = agent.folder / "config.toml", agent.paths.directory
    with agent.attach():
        got = top("--json")
        whole = json.loads(got.out)
        assert got.status == 0
        assert settled(whole["ranks"]) == settled(status_json(top, capfd))
        [lease] = whole["ranks"][0]["sets"][0]["leases"]
        [engine] = whole["engines"]
        assert engine["pid"] == lease["pid"] == os.getpid()
        assert engine["resident"] > 0
        [device] = whole["devices"]
        assert [process["pid"] for process in device["processes"]] == [os.getpid()]
        assert "set-published" in [event["happened"]["event"] for event in whole["events"]]
        assert f"engine {os.getpid()} has " in top("--once").out
    agent.stop()
    assert top("--once").status == 69


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ready", "ready"], 0),
        (["ready", "loading"], 75),
        (["loading", "failed"], 1),
        (["ready", "drained"], 1),
        (["degraded"], 1),
    ],
)
@pytest.mark.parametrize("mode", ["--once", "--json"])
def test_exit_statuses(top: Top, states: list[str], code: int, mode: str) -> None:
    with ExitStack() as stack:
        for rank, state in enumerate(states):
            stack.enter_context(Watched(top.run, rank)).status = made.status(rank, state)
        got = top(mode)
        assert (got.status, got.err) == (code, "")


def test_no_agent(top: Top) -> None:
    got = top("--once")
    assert (got.status, got.err) == (69, f"wcache-top: no agent answers in {top.run}\n")
    assert "   0  unknown (down)" in got.out
    assert top("--once", "--rank", "3").status == 69
    assert json.loads(top("--json").out)["ranks"][0]["agent"] == "down"


def test_a_host_without_anything(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.paths.CONFIG_FILE", top.run / "none")
    monkeypatch.setattr(Top, "where", ["--runtime-dir", str(top.run)])
    got = top("--once")
    assert (got.status, got.out, got.err) == (69, "", f"wcache-top: no agent answers in {top.run}\n")
    assert json.loads(top("--json").out)["ranks"] == []


def test_an_agent_that_refuses(top: Top) -> None:
    with Watched(top.run, script=lambda _, connection: connection.sendall(b'{"protocol": 2}')):
        got = top("--once")
        assert got.status == 76
        assert "speaks protocol 2" in got.err
        assert "unknown (not to be asked)" in got.out


def test_a_silent_agent(top: Top, ready: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.6)
    monkeypatch.setattr(module, "FIRST_ANSWERS_SECONDS", 0.4)
    with Watched(top.run, 1, script=lambda _agent, _connection: None):
        started = time.monotonic()
        got = top("--once")
        assert time.monotonic() - started < 3
        assert got.status == 1
        assert "rank 1: agent down, nothing known: the agent did not answer within 0.4 s" in got.out


def test_one_rank(top: Top, ready: Watched) -> None:
    with Watched(top.run, 1) as failed:
        failed.status = made.status(1, "failed")
        assert top("--once", "--rank", "0").status == 0
        assert [rank["rank"] for rank in json.loads(top("--json", "--rank", "1").out)["ranks"]] == [1]


def test_a_broken_configuration(top: Top, ready: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    top.config.write_text("[memry]")
    got = top("--once")
    assert got.status == 78
    monkeypatch.setattr("weightcache.paths.CONFIG_FILE", top.config)
    monkeypatch.setattr(Top, "where", ["--runtime-dir", str(top.run)])
    got = top("--once")
    assert got.status == 0
    assert got.err.startswith("wcache-top: note: ")
    assert "memry" in json.loads(top("--json").out)["problem"]


def test_text_of_strangers_cannot_drive_the_terminal(top: Top, ready: Watched) -> None:
    evil = "\x1b]0;owned\x07\n\u202e\udcff"
    lease = made.lease(command=evil, unit=evil)
    ready.status = made.status(model=evil, sets=(made.weight_set(model=evil, leases=(lease,)),))
    got = top("--once")
    assert got.status == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(got.out)
    assert json.loads(top("--json").out)["ranks"][0]["model"] == evil


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--watch", "1"], "--watch goes with --json"),
        (["--once", "--json"], "choose one"),
        (["--interval", "0.1"], "expected 0.25 to 60 seconds, not '0.1'"),
        (["--interval", "nan"], "expected 0.25 to 60 seconds"),
        (["--json", "--watch", "61"], "expected 0.25 to 60 seconds"),
        (["--speed", "0"], "expected a factor above 0"),
        (["--speed", "inf"], "expected a factor above 0"),
        (["--rank", "x"], "a rank is a number"),
        (["--jsn"], 'unknown option --jsn (did you mean "--json"?)'),
        (["more"], "unexpected argument 'more'"),
        (["--replay", "a", "--record", "b"], "without --record and --rank"),
        (["--replay", "a", "--rank", "0"], "without --record and --rank"),
        (["--once", "--replay", "/none/such"], "/none/such cannot be read (No such file or directory)"),
        (["--once", "--record", "/none/such"], "/none/such cannot be made (No such file or directory)"),
        (["--once", "--record", "a\0b"], "no usable path"),
    ],
)
def test_usage(top: Top, arguments: list[str], words: str) -> None:
    got = top(*arguments)
    assert (got.status, got.out) == (2, "")
    assert words in got.err
    assert got.err.startswith("wcache-top: ")
    assert got.err.count("\n") == 1


def test_help_and_version(top: Top) -> None:
    got = top("--help")
    assert got.status == 0
    for word in ("keys:", "exit status", "--replay FILE", "/ filter"):
        assert word in got.out
    assert top("--version").out.startswith("weightcache 0.")


@pytest.mark.parametrize("mode", [["--once"], ["--json"], []])
def test_no_screen_is_imported(top: Top, ready: Watched, mode: list[str]) -> None:
    with top.process(*mode, script=LISTING) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, bool(out)) == (0, True)
    names = set(err.splitlines()[-1].split())
    assert {"weightcache", "psutil"} <= names
    assert not names & {"textual", "rich", "pynvml", "torch", "prometheus_client", "tomlkit"}
    assert ("no terminal here, so this is what --once shows" in err) == (not mode)


def in_terminal(top: Top, *arguments: str, script: str = SCRIPT, **variables: str) -> tuple[int, str, str]:
    """Run in a terminal; status, what the terminal got, and stderr."""
    master, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", **variables}
    with top.process(*arguments, script=script, stdin=slave, stdout=slave, env=variables) as process:
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        os.close(master)
        _, err = process.communicate(timeout=30)
    return process.returncode, shown.decode(), err


def test_a_dumb_terminal_has_no_screen(top: Top, ready: Watched) -> None:
    status, shown, err = in_terminal(top, TERM="dumb")
    assert status == 0
    assert "ready" in shown
    assert "\x1b" not in shown
    assert "no terminal here" in err


def test_colour_in_a_terminal(top: Top, ready: Watched) -> None:
    assert "\x1b[32mready\x1b[0m" in in_terminal(top, "--once")[1]
    assert "\x1b" not in in_terminal(top, "--once", NO_COLOR="1")[1]


@pytest.mark.parametrize("package", ["textual", "psutil"])
def test_a_package_that_is_missing_is_a_sentence(top: Top, ready: Watched, package: str) -> None:
    status, shown, err = in_terminal(top, script=f"import sys; sys.modules['{package}'] = None; {SCRIPT}")
    assert (status, shown) == (2, "")
    assert err.startswith(f"wcache-top: the package {package} is not installed: pip install 'weightcache[top]'")
    assert err.count("\n") == 1


def test_json_lines_until_interrupted(top: Top, ready: Watched) -> None:
    with top.process("--json", "--watch", "0.25") as process:
        assert process.stdout
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        ready.say(made.status(state="loading"))
        while (late := json.loads(process.stdout.readline()))["ranks"][0]["state"] != "loading":
            pass
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=10)
    assert [one["schema"] for one in first] == [1, 1, 1]
    assert 0.2 < first[2]["at"] - first[1]["at"] < 1
    assert late["at"] > first[2]["at"]
    assert all(json.loads(line) for line in rest.splitlines())
    assert (process.returncode, err) == (130, "wcache-top: interrupted\n")


def test_tables_again_and_again(top: Top, ready: Watched) -> None:
    with top.process("--once", "--watch", "0.25") as process:
        assert process.stdout
        lines: list[str] = []
        while lines.count("\n") < 2:
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert sum(line.startswith("RANK") for line in lines) == 2


@pytest.mark.parametrize("mode", ["--json", "--once"])
def test_a_reader_that_leaves(top: Top, ready: Watched, mode: str) -> None:
    with top.process(mode, "--watch", "0.25") as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(10) == 141
        assert process.stderr
        assert process.stderr.read() == ""


def test_a_full_disk(top: Top, ready: Watched) -> None:
    with open("/dev/full", "w") as full, top.process("--json", stdout=full) as process:
        _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (74, "wcache-top: the output could not be written (No space left on device)\n")


def test_an_end_by_a_signal_leaves_nothing_of_a_recording_undone(top: Top, ready: Watched, tmp_path: Path) -> None:
    path = tmp_path / "r"
    with top.process("--json", "--watch", "0.25", "--record", str(path)) as process:
        assert process.stdout
        shown = [json.loads(process.stdout.readline())]
        while len(shown) < 3 or (len(path.read_text().splitlines()) < 4 and len(shown) < 50):
            shown.append(json.loads(process.stdout.readline()))
        process.kill()
        process.communicate(timeout=10)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text().splitlines()) >= 4
    got = top("--json", "--replay", str(path))
    assert (got.status, got.err) == (0, "")
    # One that came early, after a late one, is shown and not recorded: there is at most one in 0.25 s.
    assert json.loads(got.out)["at"] > shown[-1]["at"] - 0.25


def test_a_recording_is_shown_as_it_was(top: Top, ready: Watched, tmp_path: Path) -> None:
    path = str(tmp_path / "r")
    ready.status = made.status(state="failed")
    live = top("--json", "--record", path)
    assert live.status == 1
    ready.close()
    assert top("--json", "--replay", path) == live
    assert top("--once", "--replay", path).out.splitlines()[1].split()[:2] == ["0", "failed"]
    got = top("--once", "--record", path)
    assert (got.status, got.out) == (2, "")
    assert "exists, and a recording overwrites nothing" in got.err


def test_a_replay_of_lines_ends_with_its_recording(top: Top, tmp_path: Path) -> None:
    from weightcache.monitor.recording import Recorder

    path = tmp_path / "r"
    with Recorder(path) as recorder:
        for one in made.numbered([10.0, 11.0, 12.0]):
            recorder.write(one)
    got = top("--json", "--watch", "0.25", "--replay", str(path), "--speed", "4")
    assert got.status == 0
    assert [json.loads(line)["at"] for line in got.out.splitlines()] == [10, 11, 12]


def test_a_damaged_recording(top: Top, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text('{"kind": "weightcache-recording", "schema": 9}\n')
    got = top("--once", "--replay", str(path))
    assert (got.status, got.out) == (2, "")
    assert got.err == f"wcache-top: {path}, line 1: recorded with schema 9, this wcache-top reads 1\n"
