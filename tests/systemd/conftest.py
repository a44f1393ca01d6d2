"""Machines for tests: one for each module and version, and as many more as a test boots itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.environments import REPOSITORY
from tests.support.stage import staged
from tests.systemd.machine import VERSIONS, Machine, missing
from tests.systemd.rank import CONFIG, Rank, configuration, open_gates, prepare, reset

SOCKETS = ("weightcache@0.socket", "weightcache@1.socket", "weightcache-loader.socket")


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What packages install, as one tree."""
    return staged(tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="session", params=VERSIONS)
def systemd(request: pytest.FixtureRequest) -> str:
    """Every version of systemd in turn. Skips where no machine can be booted, but never in CI."""
    version = str(request.param)
    if reason := missing(version):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return version


@pytest.fixture(scope="module")
def machine(systemd: str, stage: Path) -> Iterator[Machine]:
    """A machine with rank 0 enabled, for all tests of a module."""
    with Machine(systemd, stage, enable=["weightcache@0.socket"], readable=[REPOSITORY]) as booted:
        yield booted


@pytest.fixture
def boot(systemd: str, stage: Path) -> Iterator[Callable[..., Machine]]:
    """Boot a machine of one's own: ``boot(enable=[...], files={...})``."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(Machine(systemd, stage, readable=[REPOSITORY], **options))


@pytest.fixture(scope="module")
def agents(systemd: str, stage: Path) -> Iterator[Machine]:
    """A machine with the real agent and the loader for tests, for all tests of a module."""
    files = {CONFIG: configuration()}
    with Machine(systemd, stage, enable=SOCKETS, files=files, readable=[REPOSITORY]) as booted:
        prepare(booted)
        yield booted


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe that sockets of any user are an agent's: the users of a machine are not this machine's."""
    monkeypatch.setattr("weightcache.client.trusted_uids", lambda: range(1 << 32))


@pytest.fixture
def rank(agents: Machine, trusting: None) -> Iterator[Rank]:
    """Rank 0, stopped, with nothing remembered of earlier tests."""
    reset(agents, configuration())
    yield Rank(agents)
    open_gates(agents)
