"""Packages, built once for all tests."""

from __future__ import annotations

import os

import pytest

from tests.package.builds import Builds, build
from tests.package.workshop import missing


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """The packages. Skips where none can be built, but never in CI."""
    if reason := missing("packages-12", "packages-13"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return build(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe that sockets of any user are an agent's: the users of a machine are not this machine's."""
    monkeypatch.setattr("weightcache.client.trusted_uids", lambda: range(1 << 32))
