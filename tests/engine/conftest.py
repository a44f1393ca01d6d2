"""Engines take 15 seconds to start: those that several tests can use are started once a release."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine import support
from tests.support import pagecache
from tests.support.agent import Agent
from tests.support.engine import Engine
from tests.support.environments import VERSIONS
from weightcache.checkpoint import weight_files

ARENA_BYTES = 32 << 20
"""Several arenas, so that more than one is shared and a loader's peak tells whether it frees as it packs."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What an engine without weightcache answered, and how it got its weights."""

    texts: tuple[str, ...]
    checksums: dict[str, str]
    """Empty in 0.5.17, which computes them on a GPU only."""
    memory: support.Memory
    read: int
    """Bytes of the weight files in the page cache afterwards, of which none was there before."""
    after_reset: str
    """The first prompt's continuation after SGLang overwrote the weights when it was told to."""


@dataclass(frozen=True, slots=True)
class Attached:
    """An agent that loaded, and an engine that attached to what it holds."""

    agent: Agent
    engine: Engine
    set_id: str
    read: int
    """Bytes of the weight files in the page cache when the engine was ready, of which none was there before."""
    loader_peak: int
    """Bytes that the loader had allocated or put into arenas at its fullest, beyond what SGLang's imports took."""


@pytest.fixture(scope="session", params=VERSIONS)
def sglang_version(request: pytest.FixtureRequest) -> str:
    """Every supported SGLang release in turn; the whole session's engines of one release, then those of the next."""
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 in files that nothing but this test run opens: what is read of them, these engines read."""
    copy = tmp_path_factory.mktemp("checkpoint") / smollm2.name
    shutil.copytree(smollm2, copy)
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(scope="session")
def disk(checkpoint: Path, sglang_version: str, tmp_path_factory: pytest.TempPathFactory) -> Disk:
    """Plain SGLang, measured and stopped."""
    weights = weight_files(checkpoint)
    pagecache.drop(weights)
    assert pagecache.resident(weights) == 0
    log = tmp_path_factory.mktemp("disk") / "engine.log"
    with support.plain(checkpoint, log, sglang_version) as engine:
        read = pagecache.resident(weights)
        answers = support.texts(engine)
        memory = support.memory_of(support.scheduler(engine))
        checksums = support.checksums(engine) if sglang_version != "0.5.17" else {}
        assert engine.post("/weights_checker", {"action": "reset_tensors"})[0] == 200
        after_reset = support.text(engine)
        return Disk(answers, checksums, memory, read, after_reset)


@pytest.fixture(scope="session")
def attached(
    checkpoint: Path, sglang_version: str, disk: Disk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attached]:
    """The main job: loaded once through the configured loader, then attached by wcache-launch."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    log = tmp_path_factory.mktemp("attached") / "engine.log"
    weights = weight_files(checkpoint)
    try:
        with Agent(folder, version=sglang_version, model=checkpoint, arena_bytes=ARENA_BYTES) as agent:
            with support.LoaderMemory(agent) as loader:
                set_id = agent.load()
            pagecache.drop(weights)
            assert pagecache.resident(weights) == 0
            with support.launched(agent, checkpoint, log, sglang_version) as engine:
                read = pagecache.resident(weights)
                assert "attached set" in support.line_of(engine), "\n".join(support.lines(engine))
                yield Attached(agent, engine, set_id, read, loader.peak)
    finally:
        shutil.rmtree(folder)
