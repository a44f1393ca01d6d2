"""Agents for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightcache
from tests.unit.server.harness import Agent
from tests.unit.server.kept import Kept, Managed
from tests.unit.server.ranks import Ranks


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


@pytest.fixture(scope="session")
def named_with_sdnotify(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the library that an agent below a service manager needs."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "weightcache").symlink_to(Path(weightcache.__file__).resolve().parent)
    found = importlib.util.find_spec("sdnotify")
    if found is None or found.origin is None:
        pytest.skip("the package sdnotify is not installed")
    (folder / "sdnotify").symlink_to(Path(found.origin).parent)
    return folder


@pytest.fixture
def kept(runtime_dir: Path, named_with_sdnotify: Path) -> Iterator[Kept]:
    """An agent below `wcache keeper` that is not started yet."""
    found = Kept(runtime_dir, named_with_sdnotify)
    yield found
    found.close()


@pytest.fixture
def managed(runtime_dir: Path, named_with_sdnotify: Path) -> Iterator[Managed]:
    """An agent below a fake service manager that is not started yet."""
    found = Managed(runtime_dir, named_with_sdnotify)
    yield found
    found.close()


@pytest.fixture
def ranks(runtime_dir: Path, named: Path) -> Iterator[Ranks]:
    """The agents of one host, which are not started yet."""
    made = Ranks(runtime_dir, named)
    made.configure()
    yield made
    made.close()
