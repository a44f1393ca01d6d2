"""An attach reads no weights: of a checkpoint that was not in the page cache, only the identity's samples are after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Attached, Disk
from tests.engine.support import samples
from weightcache.checkpoint import weight_files

pytestmark = pytest.mark.timeout(600)


def test_an_attach_reads_only_the_samples(attached: Attached, checkpoint: Path) -> None:
    weights = weight_files(checkpoint)
    bound = sum(map(samples, weights))
    assert bound < sum(file.stat().st_size for file in weights) / 1000
    assert 0 < attached.read <= bound


def test_a_disk_load_fails_that_check(disk: Disk, checkpoint: Path) -> None:
    weights = weight_files(checkpoint)
    assert disk.read > sum(map(samples, weights))
    assert disk.read > 0.9 * sum(file.stat().st_size for file in weights)
