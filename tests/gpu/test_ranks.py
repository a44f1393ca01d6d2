"""Parallel layouts with a real SGLang: disk load, load, attach, and agents that are killed.

WEIGHTCACHE_LAYOUTS chooses some by name, by default those for exactly this machine's GPUs; needs $WEIGHTCACHE_MODEL, a
checkpoint. tests/gpu/ranks.py runs several at a time, and keeps all that it saw.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.gpu import ranks, rig
from tests.gpu.layouts import LAYOUTS, chosen

NAMES = os.environ.get("WEIGHTCACHE_LAYOUTS", "").split()
SECONDS = 900.0


@pytest.mark.skipif(not os.environ.get("WEIGHTCACHE_MODEL"), reason="needs WEIGHTCACHE_MODEL, a checkpoint")
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_attach(layout: str) -> None:
    if why := chosen(NAMES, rig.gpu_count(), rig.profile().backend).get(layout, "not chosen"):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as work:  # a short path: it will hold sockets
        outcome = ranks.run(layout, Path(work), SECONDS)
    assert outcome.word == "ok", outcome.rows()
