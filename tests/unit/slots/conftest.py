"""An engine of two slots for each test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.slots.support import Slots


@pytest.fixture
def slots(tmp_path: Path, runtime_dir: Path) -> Iterator[Slots]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as port:
        made = Slots(tmp_path, runtime_dir, port)
        yield made
        made.close()
