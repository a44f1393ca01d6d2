"""An engine that finds its agent empty publishes its own load; and engines outlive the agent."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.engine import support
from tests.engine.conftest import Disk
from tests.support.agent import Agent, eventually
from tests.support.engine import Engine
from tests.support.environments import NEWEST

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Donated:
    """An agent without a model of its own, and the engine that filled it."""

    agent: Agent
    donor: Engine


@pytest.fixture(scope="module")
def donated(
    checkpoint: Path, sglang_version: str, disk: Disk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Donated]:
    """After ``disk``, so that no plain engine starts in between."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    log = tmp_path_factory.mktemp("donor") / "engine.log"
    try:
        with (
            Agent(folder, version=sglang_version) as agent,
            support.launched(agent, checkpoint, log, sglang_version) as donor,
        ):
            yield Donated(agent, donor)
    finally:
        shutil.rmtree(folder)


def test_one_line_says_so(donated: Donated) -> None:
    (resident,) = donated.agent.status().sets
    line = support.line_of(donated.donor)
    found = re.fullmatch(r"rank 0: loaded from disk and donated set (\w{8})\.\. \((\d+) tensors, .+\)", line)
    assert found, line
    assert resident.id.startswith(found[1])
    assert resident.tensors == int(found[2])


def test_the_donor_serves_from_what_it_published(donated: Donated, disk: Disk) -> None:
    status = donated.agent.status()
    assert status.state == "ready"
    (resident,) = status.sets
    assert [lease.pid for lease in resident.leases] == [support.scheduler(donated.donor)]
    assert support.texts(donated.donor) == disk.texts
    support.assert_maps(donated.donor, donated.agent.inodes(), resident.bytes)


def test_the_donor_holds_no_second_copy(donated: Donated, disk: Disk) -> None:
    """glibc may keep what the load freed, up to its own thresholds; a second copy would not fit below this."""
    (resident,) = donated.agent.status().sets
    support.text(donated.donor)
    memory = support.memory_of(support.scheduler(donated.donor))
    assert memory.anonymous <= disk.memory.anonymous - 0.8 * resident.bytes


def test_what_a_donor_published_is_what_a_loader_publishes(donated: Donated) -> None:
    checked = donated.agent.wcache("verify")
    assert checked.returncode == 0, checked.stderr


def test_a_second_engine_attaches_and_both_outlive_the_agent(
    donated: Donated, disk: Disk, checkpoint: Path, sglang_version: str, tmp_path: Path
) -> None:
    agent = donated.agent
    (resident,) = agent.status().sets
    with support.launched(agent, checkpoint, tmp_path / "log", sglang_version) as second:
        assert "attached set" in support.line_of(second)
        both = {support.scheduler(donated.donor), support.scheduler(second)}
        assert {lease.pid for lease in agent.status().sets[0].leases} == both
        assert support.texts(second) == disk.texts
        support.assert_maps(second, agent.inodes(), resident.bytes)
        inodes = support.memory_of(support.scheduler(second)).inodes

        agent.kill()
        for engine in (second, donated.donor):
            assert support.text(engine) == disk.texts[0]
        agent.start()
        # Nothing keeps the descriptors for an agent without systemd: it holds nothing, and knows who still does.
        eventually(
            lambda: {lease.pid for lease in agent.status().orphans} == both,
            30.0,
            lambda: f"no renewed leases: {agent.status()}",
        )
        assert agent.status().sets == ()
        assert "renewed the lease" in second.text()
        for engine in (second, donated.donor):
            support.assert_maps(engine, inodes, resident.bytes)
            assert support.text(engine) == disk.texts[0]


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_a_donor_that_dies_before_its_commit_leaves_nothing(
    checkpoint: Path, sglang_version: str, runtime_dir: Path, tmp_path: Path
) -> None:
    with Agent(runtime_dir, version=sglang_version) as agent:
        engine = support.launched(agent, checkpoint, tmp_path / "log", sglang_version).start()
        try:
            eventually(
                lambda: (found := agent.status().progress) and found.phase != "donor",
                120.0,
                lambda: f"no donation began: {engine.tail()}",
            )
            for process in engine.family():
                if process.pid != engine.process.pid:
                    process.kill()
            status = agent.await_state("empty", 10.0)
            assert status.sets == ()
            assert status.progress is None
            eventually(lambda: agent.arenas == 0, 5.0, lambda: f"{agent.arenas} arenas are left")
        finally:
            engine.stop()
        assert not any(psutil.pid_exists(process.pid) for process in engine.family())
