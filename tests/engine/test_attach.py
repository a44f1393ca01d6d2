"""Attach: equal text, from exactly the published memory, without a copy of the weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine import support
from tests.engine.conftest import Attached, Disk
from tests.support.agent import eventually
from tests.support.environments import NEWEST

pytestmark = pytest.mark.timeout(600)


def test_the_text_is_that_of_a_disk_load(attached: Attached, disk: Disk) -> None:
    assert disk.texts[0].startswith(" 9, 10, 11, 12,")
    assert len(set(disk.texts)) == len(support.PROMPTS)
    assert support.texts(attached.engine) == disk.texts


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_every_weight_is_that_of_a_disk_load(attached: Attached, disk: Disk) -> None:
    assert len(disk.checksums) > 100
    assert support.checksums(attached.engine) == disk.checksums


def test_the_engine_maps_exactly_the_published_arenas_read_only(attached: Attached, disk: Disk) -> None:
    (resident,) = attached.agent.status().sets
    assert resident.id == attached.set_id
    inodes = attached.agent.inodes(attached.set_id)
    assert len(inodes) == resident.arenas > 1
    support.assert_maps(attached.engine, inodes, resident.bytes)
    assert disk.memory.inodes == frozenset()


def test_the_engine_has_no_weights_of_its_own(attached: Attached, disk: Disk) -> None:
    """Anonymous memory: an engine from disk has its weights there, an attached one must be short by nearly all of them.

    Both answered the same requests. A fifth of the arena is left for what the allocator keeps; an engine with a second
    copy, or one that copied pages of the arena on write, would miss this by far.
    """
    (resident,) = attached.agent.status().sets
    support.text(attached.engine)
    memory = support.memory_of(support.scheduler(attached.engine))
    assert memory.anonymous <= disk.memory.anonymous - 0.8 * resident.bytes


def test_one_line_says_how(attached: Attached) -> None:
    (resident,) = attached.agent.status().sets
    line = support.line_of(attached.engine)
    found = re.fullmatch(
        r"rank 0: attached set (\w{8})\.\. \((\d+) tensors, .+ in \d+ arenas, .+ (\d+) ms: (.+)\)", line
    )
    assert found, line
    assert resident.id.startswith(found[1])
    assert int(found[2]) == resident.tensors > 100
    assert {"observe", "connect", "receive", "map", "build", "bind"} <= set(re.findall(r"[a-z]+", found[4]))


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_two_engines_at_once(
    attached: Attached, disk: Disk, checkpoint: Path, sglang_version: str, tmp_path: Path
) -> None:
    agent = attached.agent
    first = support.scheduler(attached.engine)
    with support.launched(agent, checkpoint, tmp_path / "log", sglang_version) as engine:
        second = support.scheduler(engine)
        assert {lease.pid for lease in agent.status().sets[0].leases} == {first, second}
        assert support.texts(engine) == disk.texts
        support.assert_maps(engine, agent.inodes(attached.set_id), agent.status().sets[0].bytes)
        engine.kill()
        eventually(
            lambda: [lease.pid for lease in agent.status().sets[0].leases] == [first],
            2.0,
            lambda: f"the lease of a killed engine lives on: {agent.status().sets[0].leases}",
        )
        assert agent.status().orphans == ()
    assert support.text(attached.engine) == disk.texts[0]
