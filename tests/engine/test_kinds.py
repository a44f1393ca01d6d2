"""Every kind of model as SGLang's CUDA code loads it, carried into another one: no name, object or value is lost.

No GPU is needed: kernels that repack weights have stand-ins (tests/models/carry.py). A real GPU compares the bytes and
what the engines answer (tests/gpu/test_parity.py).
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.models.companions import DRAFTS
from tests.models.kinds import DIFFERENT, KINDS
from tests.support.environments import REPOSITORY, engine_variables, environments

NOT_FROM_THE_CHECKPOINT = {
    "mamba": (".q_norm.weight", ".k_norm.weight"),  # made, and never used
    "fp8-block-mla": (".k_scale", ".v_scale"),  # where a checkpoint has none, they are one
    "eagle/draft": ("lm_head.weight",),  # the target's, later
}
NAMES = [
    name for kind in DIFFERENT for name in ((kind, f"{kind}/draft") if KINDS[kind].companion in DRAFTS else (kind,))
]


@pytest.fixture(scope="module")
def reports(sglang_version: str) -> dict[str, Any]:
    """What tests/models/check.py says about each kind with one release of SGLang."""
    done = subprocess.run(
        [environments().engine(sglang_version), "-m", "tests.models.check"],
        cwd=REPOSITORY,
        env={**engine_variables(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["kind"] for report in found] == NAMES, done.stderr[-3000:]
    return {report["kind"]: report for report in found}


@pytest.fixture(params=NAMES)
def report(request: pytest.FixtureRequest, reports: dict[str, Any]) -> Any:
    """The report of one kind."""
    return reports[request.param]


def test_the_checkpoint_is_what_sglang_reads(report: dict[str, Any]) -> None:
    assert report["tensors"] > 10, report["error"]
    assert report["unused"] == []
    expected = NOT_FROM_THE_CHECKPOINT.get(report["kind"], ())
    assert [name for name in report["unfilled"] if not name.endswith(expected)] == []


def test_nothing_is_lost(report: dict[str, Any]) -> None:
    for package in KINDS[report["kind"].partition("/")[0]].needs:
        if report["error"] == f"ModuleNotFoundError: No module named '{package}'":
            pytest.skip(f"{package} comes with 380 MB of GPU code")
    assert report["error"] == ""
    assert report["deviations"] == []
    assert report["carried"] >= 10
