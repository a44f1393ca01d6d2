"""Real agents, as the agent's own tests start them; and a check that no thread is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.unit.monitor.made import eventually
from tests.unit.server.conftest import kept, named, named_with_sdnotify  # noqa: F401


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """What a test started has ended with it."""
    before = set(threading.enumerate())
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t not in before], 8)
