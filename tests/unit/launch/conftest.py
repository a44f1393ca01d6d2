"""Fixtures for the launcher's tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.support import FAKE, SOURCE, FakeAgent, Launcher, alive, eventually, rank_status
from weightcache.paths import RankPaths

LOADER = Path(__file__).parents[2] / "support" / "test_loader.py"


@pytest.fixture
def launcher(tmp_path: Path, runtime_dir: Path) -> Launcher:
    directory = tmp_path / "work"
    directory.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "WEIGHTCACHE", "FAKE"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(SOURCE)])
    environment["WEIGHTCACHE_RUNTIME_DIR"] = str(runtime_dir)
    environment["XDG_RUNTIME_DIR"] = str(runtime_dir)
    environment["WEIGHTCACHE_CACHE_DIR"] = str(directory / "cache")
    environment["WEIGHTCACHE_STATE_DIR"] = str(directory / "state")
    environment["TMPDIR"] = str(runtime_dir)  # launchers and keepers that are killed leave a folder there
    return Launcher(directory, runtime_dir, environment)


@pytest.fixture
def agent(launcher: Launcher) -> Iterator[Callable[..., FakeAgent]]:
    agents: list[FakeAgent] = []

    def make(
        rank: int = 0, doors: tuple[str, ...] = ("public", "status"), silent: bool = False, **changes: Any
    ) -> FakeAgent:
        status = rank_status(rank=rank, **changes)
        agents.append(FakeAgent(RankPaths(launcher.runtime_dir, rank), status, doors, silent))
        return agents[-1]

    yield make
    for one in agents:
        one.close()


@pytest.fixture
def daemon(launcher: Launcher) -> Iterator[Launcher]:
    """The launcher with an interpreter whose weightcache.loader is the tests'; ends the agents it started."""
    python = launcher.directory / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = weightcache.loader ]; then shift 2; exec {sys.executable} {LOADER} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    launcher.environment["WCTEST_FINGERPRINT"] = json.dumps({"revision": "", "override_args": ""})
    launcher.mode = ["--weight-cache-mode", "daemon", "--wcache-python", str(python), "--wcache-wait", "20"]
    yield launcher
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"weightcache.server" in line and os.fsencode(launcher.runtime_dir) in line:
                pids.add(int(entry.name))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: not any(alive(pid) for pid in pids), 15)
