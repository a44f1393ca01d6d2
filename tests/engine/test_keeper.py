"""The agent is killed below an engine that answers: under a keeper neither that engine nor the next one notices."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine import support
from tests.support import pagecache
from tests.support.agent import Agent, eventually
from tests.support.environments import NEWEST
from weightcache.checkpoint import weight_files

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]

ARENA_BYTES = 32 << 20
TOKENS = 150
"""An answer that takes seconds."""


def leases(agent: Agent) -> list[int]:
    (held,) = agent.status().sets
    return [lease.pid for lease in held.leases]


def test_an_agent_is_killed(checkpoint: Path, sglang_version: str, runtime_dir: Path, tmp_path: Path) -> None:
    weights = weight_files(checkpoint)
    with (
        Agent(runtime_dir, version=sglang_version, model=checkpoint, arena_bytes=ARENA_BYTES, keeper=True) as agent,
        ThreadPoolExecutor() as pool,
    ):
        set_id = agent.load()
        (published,) = agent.status().sets
        inodes = agent.inodes(set_id)
        assert len(inodes) == published.arenas > 1
        with support.launched(agent, checkpoint, tmp_path / "first", sglang_version) as first:
            assert "attached set" in support.line_of(first)
            process = support.scheduler(first)
            assert leases(agent) == [process]
            before = support.texts(first)
            answer = pool.submit(first.tokens, (1, 2, 3, 5, 8, 13), TOKENS)
            time.sleep(0.5)

            killed = agent.pid
            agent.kill()
            agent.await_answer()
            assert not answer.done()
            assert agent.pid != killed
            (adopted,) = agent.status().sets
            assert (adopted.id, adopted.version, adopted.digest) == (set_id, published.version, published.digest)
            assert agent.inodes(set_id) == inodes

            assert len(answer.result(120)) == TOKENS
            first.flush()
            assert support.texts(first) == before
            eventually(lambda: leases(agent) == [process], 10, agent.text)
            assert agent.status().orphans == ()

            pagecache.drop(weights)
            assert pagecache.resident(weights) == 0
            with support.launched(agent, checkpoint, tmp_path / "second", sglang_version) as second:
                assert pagecache.resident(weights) <= sum(map(support.samples, weights))
                assert "attached set" in support.line_of(second)
                assert support.texts(second) == before
                for engine in (first, second):
                    support.assert_maps(engine, inodes, published.bytes)
                assert set(leases(agent)) == {process, support.scheduler(second)}
        eventually(lambda: re.search(r"set \w+ verified: ", agent.text()), 60, agent.text)
        log = agent.text()
        assert log.count("load begins") == 1
        assert log.count(" adopted: ") == 1
        assert agent.status().state == "ready"
        assert agent.status().kept == "store"
