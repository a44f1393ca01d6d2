"""`wcache` against the real agent, with the loader for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOADER = Path(__file__).parents[2] / "support/test_loader.py"

pytest.importorskip("weightcache.server.server", reason="the agent is not built yet")


@pytest.fixture
def agent(host, tmp_path):
    """Start an agent for rank 0 whose loader does what the settings (WCTEST_...) say; the fixture ends it."""
    started = []

    def start(**settings: str) -> subprocess.Popen[bytes]:
        environment = ", ".join(f"WCTEST_{name.upper()} = {json.dumps(value)}" for name, value in settings.items())
        host.config.write_text(
            f"[loader]\ncommand = {json.dumps([sys.executable, str(LOADER)])}\nenvironment = {{ {environment} }}\n"
            f'[model]\narguments = ["--model-path", "/models/test"]\n[memory]\nbackend = "host"\n'
            f'[policy]\ndamaged = "hold"\n[[rank]]\nrank = 0\n'
        )
        command = [sys.executable, "-m", "weightcache.server", "--rank", "0"]
        log = (tmp_path / "agent.log").open("wb")
        child = subprocess.Popen([*command, "--config", str(host.config), "--runtime-dir", str(host.run)], stderr=log)
        log.close()
        started.append(child)
        deadline = time.monotonic() + 20
        while not (host.run / "0.status.sock").exists():
            assert child.poll() is None, (tmp_path / "agent.log").read_text(errors="replace")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return child

    yield start
    for child in started:
        child.terminate()
        child.wait(10)


def test_a_life(host, agent):
    child = agent()
    got = host.wcache("status")
    assert (got.status, "empty" in got.out) == (1, True), got
    got = host.wcache("load", "--wait", "30")
    assert got.status == 0, got
    assert "rank 0: ready, set " in got.out
    got = host.wcache("status", "--json")
    assert got.status == 0, got
    (rank,) = json.loads(got.out)["ranks"]
    assert (rank["state"], rank["agent"], rank["pid"]) == ("ready", "up", child.pid)
    set_id = rank["sets"][0]["id"]
    assert set_id in host.wcache("status").out
    assert host.wcache("attach", "--check", "--set", set_id).status == 0
    got = host.wcache("verify")
    assert got.status == 0, got
    assert "1 set intact" in got.out
    got = host.wcache("evict", set_id[:-1])
    assert got.status == 0, got
    assert set_id in got.out
    got = host.wcache("evict", set_id)
    assert got.status == 1, got
    got = host.wcache("drain", "--wait", "1")
    assert got.status == 0, got
    got = host.wcache("status")
    assert (got.status, "drained by " in got.out) == (1, True), got
    got = host.wcache("load")
    assert (got.status, got.err.count("\n")) == (1, 1), got
    assert host.wcache("resume").status == 0
    assert host.wcache("load").status == 0
    child.terminate()
    child.wait(10)
    got = host.wcache("status")
    assert got.status == 69, got
    assert "stopped (down)" in got.out
    assert "last known" in got.out


def test_a_load_that_fails(host, agent):
    agent(mode="exit")
    got = host.wcache("load")
    assert got.status == 1, got
    assert got.err.startswith("wcache: ")
    assert got.err.count("\n") == 1
    got = host.wcache("status")
    assert got.status == 1
    assert "failed: " in got.out
    assert "load-failed" in got.out


def test_a_load_that_takes_long_can_be_left(host, agent, tmp_path):
    os.mkfifo(tmp_path / "loading")
    agent(gates=str(tmp_path))
    got = host.wcache("load", "--wait", "0.3")
    assert got.status == 75, got
    got = host.wcache("status")
    assert got.status == 75, got
    assert "loading: " in got.out


def test_weights_that_went_bad(host, agent):
    agent(mode="wrong-digest")
    assert host.wcache("load").status == 0
    got = host.wcache("verify")
    assert got.status == 1, got
    assert host.wcache("status").status == 1
