"""Keepers for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.keeper.harness import Rig


@pytest.fixture
def rig(runtime_dir: Path) -> Iterator[Rig]:
    """A keeper that is not started yet."""
    found = Rig(runtime_dir)
    yield found
    found.close()
