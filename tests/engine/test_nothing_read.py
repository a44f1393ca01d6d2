"""An attach reads no weights: of a checkpoint that was not in the page cache, only the identity's samples are after."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tests.engine.conftest import Attached, Disk
from weightcache.checkpoint import SAMPLE_BYTES, SAMPLES, weight_files

pytestmark = pytest.mark.timeout(600)


def allowed(file: Path) -> int:
    """Pages that the identity of one safetensors file touches: its header, and samples that need not be aligned."""
    with file.open("rb") as opened:
        header = 8 + int.from_bytes(opened.read(8), "little")
    pages = -(-header // mmap.PAGESIZE) + SAMPLES * (-(-SAMPLE_BYTES // mmap.PAGESIZE) + 1)
    return pages * mmap.PAGESIZE


def test_an_attach_reads_only_the_samples(attached: Attached, checkpoint: Path) -> None:
    weights = weight_files(checkpoint)
    bound = sum(map(allowed, weights))
    assert bound < sum(file.stat().st_size for file in weights) / 1000
    assert 0 < attached.read <= bound


def test_a_disk_load_fails_that_check(disk: Disk, checkpoint: Path) -> None:
    weights = weight_files(checkpoint)
    assert disk.read > sum(map(allowed, weights))
    assert disk.read > 0.9 * sum(file.stat().st_size for file in weights)
