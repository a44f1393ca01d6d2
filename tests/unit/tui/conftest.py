"""Every screen is drawn at the same time of day and without what this machine's environment would change."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from textual import _wait, screen


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "TEXTUAL_THEME", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    # The pilot waits after each key until nothing is done any more; how often things are done decides how long.
    monkeypatch.setattr(screen, "UPDATE_PERIOD", 0.001)
    monkeypatch.setattr(_wait, "SLEEP_GRANULARITY", 0.01)
    monkeypatch.setattr(_wait, "SLEEP_IDLE", 0.0005)
    yield
    monkeypatch.undo()
    time.tzset()
