"""``wcache parity`` with real servers: a mixture of experts attached is the one that a disk load gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import models
from tests.support.agent import Agent
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import NEWEST, environments

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]

METHODS = {"UnquantizedEmbeddingMethod": 2, "UnquantizedLinearMethod": 6, "UnquantizedFusedMoEMethod": 2}
"""Embedding and head; of each layer the projections around attention, the router, the experts."""


def test_experts_attached_are_experts_loaded(sglang_version: str, runtime_dir: Path, tmp_path: Path) -> None:
    agent = Agent(runtime_dir, version=sglang_version)  # only for its configuration: the comparison has its own
    kept = tmp_path / "kept"
    options = ("--config", agent.config, "--json", "--keep", kept)
    done = subprocess.run(
        [environments().agent.with_name("wcache"), "parity", *options, models.kind("moe"), *CPU_ARGUMENTS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == ""
    assert found["deviations"] == []
    assert found["deterministic"]
    assert {name.partition("(")[0].rpartition(".")[2]: count for name, count in found["methods"].items()} == METHODS
    assert found["tensors"] == 22
    assert found["bytes"] > 18e6
    assert found["tokens"] == 72
    sides = [json.loads((kept / side / "rank-0.target.json").read_text()) for side in ("disk", "attached")]
    assert [len(side["tensors"]) for side in sides] == [22, 22]
    assert all(len(side["values"]) > 1000 for side in sides)
    assert json.loads((kept / "result.json").read_text()) == found
