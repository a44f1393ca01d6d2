"""Every verb of SGLang that would write into weights is refused over HTTP, and the server goes on as if nothing was."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.engine import support
from tests.engine.conftest import Attached, Disk

pytestmark = pytest.mark.timeout(600)

SENTENCE = "shared through weightcache"
NOT_IN_0_5_17 = ("/begin_weight_update", "/end_weight_update")
VERBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/update_weights_from_disk", {"model_path": "MODEL"}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [base64.b64encode(b"any").decode()]}),
    (
        "/update_weights_from_distributed",
        {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[576]], "group_name": "a"},
    ),
    ("/update_weights_from_ipc", {"zmq_handles": {"GPU-0": "ipc:///tmp/none"}}),
    ("/begin_weight_update", {}),
    ("/end_weight_update", {}),
    ("/weights_checker", {"action": "reset_tensors"}),
    ("/release_memory_occupation", {}),
    ("/release_memory_occupation", {"tags": ["weights"]}),
    ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    ("/resume_memory_occupation", {}),
    ("/resume_memory_occupation", {"tags": ["weights"]}),
)
# Releasing tags=["kv_cache"] is allowed, but needs a GPU: SGLang synchronizes CUDA in it, which ends a CPU's server.


@pytest.mark.parametrize(("path", "body"), VERBS, ids=[f"{path[1:]}-{list(body.values())}" for path, body in VERBS])
def test_the_verb_is_refused(
    attached: Attached, disk: Disk, checkpoint: Path, sglang_version: str, path: str, body: dict[str, Any]
) -> None:
    if sglang_version == "0.5.17" and path in NOT_IN_0_5_17:
        assert attached.engine.post(path, body)[0] == 404
        return
    before = support.scheduler(attached.engine)
    sent = {key: str(checkpoint) if value == "MODEL" else value for key, value in body.items()}
    status, answer = attached.engine.post(path, sent)
    assert status == 400, answer
    assert answer.get("success", False) is False
    assert SENTENCE in str(answer), answer
    said = attached.engine.generate(support.PROMPTS[0], 16)
    assert len(said) > 10
    assert disk.texts[0].startswith(said)
    assert support.scheduler(attached.engine) == before


def test_plain_sglang_would_have_written(disk: Disk) -> None:
    assert disk.after_reset != disk.texts[0]


def test_the_weights_are_as_published(attached: Attached, disk: Disk) -> None:
    """After all of the above: digests, text, mapping and lease."""
    verified = attached.agent.wcache("verify")
    assert verified.returncode == 0, verified.stderr
    assert support.text(attached.engine) == disk.texts[0]
    (resident,) = attached.agent.status().sets
    support.assert_maps(attached.engine, attached.agent.inodes(), resident.bytes)
    assert [lease.pid for lease in resident.leases] == [support.scheduler(attached.engine)]


def test_looking_at_weights_is_allowed(attached: Attached) -> None:
    status, values = attached.engine.post("/get_weights_by_name", {"name": "model.norm.weight"})
    assert status == 200
    assert any(values)
    assert attached.engine.post("/weights_checker", {"action": "snapshot"})[0] == 200
