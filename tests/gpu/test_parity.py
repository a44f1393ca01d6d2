"""Disk load and attach are the same engine, for every kind of model and method of quantization.

WEIGHTCACHE_KINDS chooses some of them by name; tests/gpu/parity.py compares many at a time and keeps all that it saw.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu import parity, rig
from tests.models.kinds import KINDS

CHOSEN = os.environ.get("WEIGHTCACHE_KINDS", "").split() or [
    kind for kind, what in KINDS.items() if what.on_cpu or rig.profile().backend == "cuda"
]
SECONDS = 600.0


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", CHOSEN)
def test_attached_is_loaded(kind: str, tmp_path: Path) -> None:
    outcome = parity.compare(kind, tmp_path, SECONDS)
    assert outcome.word == "equal", outcome.said
    assert outcome.result["tensors"] > 0
    assert outcome.result["tokens"] > 0
