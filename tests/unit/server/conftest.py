"""Agents for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import weightcache
from tests.unit.server.harness import Agent


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package has its import name, for interpreters that have it not installed."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "weightcache").symlink_to(Path(weightcache.__file__).resolve().parent)
    return folder


@pytest.fixture
def agent(runtime_dir: Path, named: Path) -> Iterator[Agent]:
    """An agent that is not started yet."""
    found = Agent(runtime_dir, named)
    yield found
    found.close()
