"""What the loader leaves behind: a checked set, a status with every field, and no more memory than was promised."""

from __future__ import annotations

import json
import re

import pytest

from tests.engine.conftest import Attached
from weightcache.fingerprint import CONSEQUENCES

pytestmark = pytest.mark.timeout(600)

RANK = {"rank", "state", "backend", "gpu_uuid", "sets", "progress", "error"}
SET = {
    "id", "model", "revision", "version", "bytes", "arenas", "tensors", "fingerprint", "digest", "published_at",
    "load_seconds", "leases",
}  # fmt: skip
LEASE = {"pid", "uid", "unit", "command", "since"}
SLACK = 64 << 20
"""What a loader allocates besides: reading buffers, the walk, digests."""


def test_attach_check(attached: Attached) -> None:
    checked = attached.agent.wcache("attach", "--check")
    assert checked.returncode == 0, checked.stderr
    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in checked.stdout.splitlines())
    (resident,) = attached.agent.status().sets
    assert rows["set"] == attached.set_id
    assert 0 <= resident.bytes - int(rows["bytes"].replace(",", "")) < 64 << 10
    assert int(rows["tensors"]) == resident.tensors
    assert int(rows["arenas"]) == resident.arenas
    for step in ("connect", "receive", "map", "digest"):
        assert re.match(r"\d+\.\d\d ms", rows[step]), rows
    assert rows["verdict"] == "intact"


def test_status_json_has_every_field(attached: Attached) -> None:
    answer = attached.agent.wcache("status", "--json")
    assert answer.returncode == 0, answer.stderr
    status = json.loads(answer.stdout)
    assert status["schema"] == 1
    (rank,) = status["ranks"]
    assert set(rank) >= RANK
    assert (rank["state"], rank["backend"], rank["progress"], rank["error"]) == ("ready", "host", None, None)
    (resident,) = rank["sets"]
    assert set(resident) >= SET
    assert set(resident["fingerprint"]) == set(CONSEQUENCES)
    assert resident["load_seconds"] > 0
    (lease,) = resident["leases"]
    assert set(lease) >= LEASE


def test_the_resident_part_is_small(attached: Attached) -> None:
    """The agent has handed the set out; it never mapped it."""
    assert attached.agent.rss < 30e6


def test_the_loaders_peak(attached: Attached) -> None:
    """Shard, one arena and the largest tensor: never two copies of the weights."""
    (resident,) = attached.agent.status().sets
    assert resident.arenas > 4
    one_arena = -(-resident.bytes // resident.arenas)
    largest = 2 * 49152 * 576  # SmolLM2's embedding
    allowed = resident.bytes + 2 * one_arena + largest + SLACK
    assert allowed < 2 * resident.bytes
    assert resident.bytes * 0.9 < attached.loader_peak <= allowed
