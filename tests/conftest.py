"""Fixtures and rules for all tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.support.environments import REPOSITORY, VERSIONS, Environments, environments
from tests.support.temporary import own_folder

GPU = Path("/dev/nvidiactl")


def pytest_configure(config: pytest.Config) -> None:
    """Set up what all tests rely on."""
    # GPU machines bring pytest alone: the timeout marks of the plugin mean nothing there, and are no error.
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): a limit, where pytest-timeout is installed")
    # What a shell ignores for its background jobs (and nohup), the processes of the tests would ignore too.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # On a GPU machine compilers keep in $TMPDIR what takes minutes. pytest keeps its folders where they always are.
    if not GPU.exists():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        stack.enter_context(own_folder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder decides: tests/engine starts engines, tests/gpu needs a GPU."""
    for item in items:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        if folder in ("engine", "gpu"):
            item.add_marker(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    dry_run = os.environ.get("WEIGHTCACHE_RIG") == "host"
    if item.get_closest_marker("gpu") and not dry_run and not GPU.exists():
        pytest.skip(f"needs an NVIDIA GPU, and {GPU} does not exist")


@pytest.fixture(scope="session")
def envs() -> Environments:
    """The environments that ``make env`` builds."""
    found = environments()
    try:
        found.engine()
    except FileNotFoundError as error:
        pytest.fail(str(error), pytrace=False)
    return found


@pytest.fixture(params=VERSIONS)
def sglang_version(request: pytest.FixtureRequest) -> str:
    """Every supported SGLang release in turn."""
    return str(request.param)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """An empty folder with a short path: a Unix socket's path may have 107 bytes, and tmp_path is longer than that."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a small real model that writes real text."""
    return models.smollm2()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Qwen3 of 3 M parameters: starts faster, where the text does not matter."""
    return models.tiny()
