"""Fixtures for the launcher's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.support import FAKE, SOURCE, FakeAgent, Launcher, rank_status
from weightcache.paths import RankPaths


@pytest.fixture
def launcher(tmp_path: Path, runtime_dir: Path) -> Launcher:
    directory = tmp_path / "work"
    directory.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "WEIGHTCACHE", "FAKE"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(SOURCE)])
    environment["WEIGHTCACHE_RUNTIME_DIR"] = str(runtime_dir)
    environment["XDG_RUNTIME_DIR"] = str(runtime_dir)
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
