"""Restart mode with the real engine: killed twice, and served on by processes that had imported SGLang before."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine import support
from tests.support.agent import eventually
from tests.support.engine import Engine
from tests.support.environments import NEWEST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PARKED = "warm worker parked: 3 processes"
SERVER = "-m sglang.launch_server"
PARK_SECONDS = 150.0
DIFFERENT = {"random_seed", "startup_time", "internal_states"}
"""What two engines that were started afresh differ in, too."""


def child(parent: int, word: str) -> int:
    """The one child of a process with ``word`` in its command line."""
    (found,) = [one.pid for one in psutil.Process(parent).children() if word in " ".join(one.cmdline())]
    return int(found)


def await_parked(engine: Engine, times: int) -> None:
    eventually(lambda: engine.text().count(PARKED) >= times, PARK_SECONDS, engine.tail)


def info(engine: Engine) -> dict[str, Any]:
    status, answer = engine.get("/server_info")
    assert status == 200
    return {name: value for name, value in answer.items() if name not in DIFFERENT}


def test_an_engine_that_is_killed_serves_on_from_a_warm_worker(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "engine.log"
    with support.launched(tmp_path, smollm2, log, NEWEST, options=["--wcache-restart", "--wcache-hold-port"]) as engine:
        cold = engine.start_seconds
        launcher = engine.process.pid
        text, arguments = support.text(engine), info(engine)
        seconds = []
        for number, whom in enumerate(("main", "scheduler"), 1):
            await_parked(engine, number)
            warm, before = child(launcher, "weightcache.warm "), child(launcher, SERVER)
            victim = before if whom == "main" else child(before, "sglang::scheduler")
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            eventually(lambda gone=before: not psutil.pid_exists(gone), 30, engine.tail)
            with socket.create_connection(("127.0.0.1", engine.port), 5):  # while nobody is there to accept it
                pass
            engine.wait_ready()
            assert support.text(engine) == text
            seconds.append(time.monotonic() - began)
            assert child(launcher, SERVER) == warm
            assert info(engine) == arguments
        process = psutil.Process(warm)
        titles = sorted(" ".join(one.cmdline()).strip() for one in process.children())
        assert titles[1:] == ["sglang::detokenizer", "sglang::scheduler"]
        arguments_given = engine.argv[engine.argv.index("--model-path") :]
        assert process.cmdline()[1:] == ["-m", "sglang.launch_server", *arguments_given]
        assert not [line for line in support.lines(engine) if "afresh" in line or "not from a warm worker" in line]
        with capsys.disabled():
            parked_line = next(line for line in support.lines(engine) if PARKED in line)
            print(f"\ncold {cold:.1f} s; after SIGKILL {', '.join(f'{s:.1f} s' for s in seconds)}; {parked_line}")
        family = engine.family()
        engine.process.terminate()
        assert engine.process.wait(60) in (0, -signal.SIGTERM)
        eventually(lambda: not any(map(psutil.Process.is_running, family)), 30, engine.tail)
