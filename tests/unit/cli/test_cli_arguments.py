"""The command line itself: help, mistakes, interruptions, closed pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from weightcache.cli.main import main, parser
from weightcache.cli.parsing import Parser

COMMANDS = ["status", "load", "attach", "verify", "evict", "drain", "resume", "config", "doctor", "version"]


def run(*arguments, **keywords):
    return subprocess.run(
        [sys.executable, "-m", "weightcache.cli", *arguments], capture_output=True, text=True, timeout=30, **keywords
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["stauts"], "unknown command 'stauts' (did you mean \"status\"?); see wcache --help"),
        (["zzzzzz"], "unknown command 'zzzzzz' (known: status, load,"),
        (["config", "chekc"], "unknown command 'chekc' (did you mean \"check\"?); see wcache config --help"),
        (["config"], "required: ACTION"),
        (["status", "--jsn"], 'unknown option --jsn (did you mean "--json"?); see wcache status --help'),
        (["status", "--js"], "unknown option --js"),
        (["status", "--zzzz=3"], "unknown option --zzzz; see wcache status --help"),
        (["status", "extra"], "unexpected argument 'extra'"),
        (["status", "--rank", "-1"], "a rank is a number from 0 to 65535, not '-1'"),
        (["status", "--rank", "x"], "a rank is a number from 0 to 65535, not 'x'"),
        (["status", "--rank", "65536"], "a rank is a number"),
        (["load", "--wait", "nan"], "expected seconds, not 'nan'"),
        (["load", "--wait", "inf"], "expected seconds, not 'inf'"),
        (["load", "--wait=-1"], "expected seconds, not '-1'"),
        (["attach"], "attach needs --check"),
        (["--config", "", "status"], "no usable path"),
        (["config", "get", "memory.bakend"], "unknown key 'memory.bakend' (did you mean \"memory.backend\"?)"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(capfd, arguments, says):
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("wcache: ")
    assert err.count("\n") == 1
    assert says in err


def parsers(top: Parser):
    yield top
    for action in top._actions:
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                yield from parsers(child)


def test_everything_has_help(capfd):
    for one in parsers(parser()):
        assert one.description, one.prog
        for action in one._actions:
            assert action.help or isinstance(action.choices, dict), (one.prog, action.dest)
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "examples:" in out
    assert "exit status:" in out
    for command in COMMANDS:
        assert f"\n    {command} " in out
        assert main([command, "--help"]) == 0


def test_global_options_may_stand_on_either_side(host, make_status):
    from weightcache.protocol import RankReport

    host.agent(0, RankReport(make_status()))
    assert main(["status", "--config", str(host.config), "--runtime-dir", str(host.run)]) == 0
    assert main(["--runtime-dir", "/nonexistent", "status", "--runtime-dir", str(host.run)]) == 0


def test_the_runtime_directory_comes_from_the_configuration(host, make_status, tmp_path):
    from weightcache.protocol import RankReport

    host.agent(0, RankReport(make_status()))
    host.config.write_text(f'[agent]\nruntime_dir = "{host.run}"\n[memory]\nbackend = "host"\n')
    assert main(["--config", str(host.config), "status"]) == 0


def test_version(capfd):
    assert main(["version"]) == 0
    first = capfd.readouterr().out
    assert first.startswith("weightcache 0.")
    assert "(protocol 1, Python 3." in first
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == first


def test_an_internal_error_is_one_sentence(host, monkeypatch, capfd):
    def broken(_):
        raise RuntimeError("so sad\x1b")

    monkeypatch.setattr("weightcache.cli.ranks.open_site", broken)
    got = host.wcache("status")
    assert got.status == 70
    hint = "WEIGHTCACHE_TRACEBACK=1 shows where"
    assert got.err == f"wcache: internal error: RuntimeError: so sad\\x1b ({hint})\n"
    monkeypatch.setenv("WEIGHTCACHE_TRACEBACK", "1")
    assert "Traceback" in host.wcache("status").err


def test_interrupted(host, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("weightcache.cli.ranks.open_site", interrupt)
    got = host.wcache("status")
    assert (got.status, got.err) == (130, "wcache: interrupted\n")


def test_ctrl_c_while_an_agent_is_busy(host):
    host.agent(0)  # never answers
    command = [sys.executable, "-m", "weightcache.cli", "--config", host.config, "--runtime-dir", host.run, "load"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not host.agents[0].asked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out, err) == (130, "", "wcache: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_traceback(unbuffered):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        got = subprocess.run(
            [sys.executable, "-m", "weightcache.cli", "version"],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=30,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (got.returncode, got.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(unbuffered):
    with open("/dev/full", "wb") as full:
        got = subprocess.run(
            [sys.executable, "-m", "weightcache.cli", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert got.returncode == 74
    assert got.stderr == b"wcache: the output could not be written (No space left on device)\n"


def test_a_terminal_without_the_characters(host, make_status):
    from weightcache.protocol import RankReport

    host.agent(
        0,
        RankReport(make_status(model="/modèles/\udc80")),
    )
    got = run(
        "--config",
        str(host.config),
        "--runtime-dir",
        str(host.run),
        "status",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert got.returncode == 0, got.stderr
    assert r"/mod\xe8les/\udc80" in got.stdout


def test_it_starts_light():
    code = (
        "import json, sys, weightcache.cli.main; "
        "heavy = ('torch', 'tomlkit', 'sglang', 'cuda', 'psutil'); "
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(got.stdout) == []
