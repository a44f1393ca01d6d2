"""Two ranks of one engine, each with its own agent: all of them attach, or all donate, or all load from disk.

The agents load in one launch for both ranks, and an engine attaches to ranks of one load only.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine import support
from tests.support.agent import Agent, eventually
from tests.support.engine import Engine
from tests.support.environments import NEWEST

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
RANKS = (0, 1)


def two_ranks(runtime_dir: Path, model: Path, log: Path) -> Engine:
    """An engine with two tensor-parallel ranks.

    SGLang wants to know which core each gets, and takes NCCL for itself when it finds the library, even on the CPU.
    """
    return support.launched(runtime_dir, model, log, arguments=("--tp-size", "2"), environment=variables())


def variables() -> dict[str, str]:
    """What SGLang needs for two ranks on the CPU."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "SGLANG_NCCL_SO_PATH": "/nonexistent/nccl"}


def together(folder: Path, model: Path, rank: int) -> Agent:
    """The agent of one of two ranks that load together."""
    return Agent(folder, rank=rank, model=model, variables=variables(), deployment={"tp_size": 2}, keeper=True)


def leased(agents: list[Agent]) -> set[int]:
    """The processes that hold the agents' sets, one each."""
    pids = []
    for agent in agents:
        (held,) = agent.status().sets
        (lease,) = held.leases
        pids.append(lease.pid)
    assert len(set(pids)) == len(agents)
    return set(pids)


def bring_back(agents: list[Agent]) -> None:
    """The second agent loses its weights, and has them loaded again: the first one's rank goes on with its own."""
    inodes, published = agents[0].inodes(), agents[0].text().count("published set")
    agents[1].stop()
    agents[1].start()
    assert agents[1].status().sets == ()
    agents[1].load()
    assert agents[0].inodes() == inodes
    log = agents[0].text()
    assert log.count("published set") == published + 1, log[-4000:]
    assert "this rank goes on with its target weights of load" in log


def test_all_ranks_or_none(sglang_version: str, tiny_model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        agents = [stack.enter_context(Agent(runtime_dir, rank=rank)) for rank in RANKS]
        where = agents[0].runtime_dir

        with two_ranks(where, tiny_model, tmp_path / "donors") as engine:
            for rank in RANKS:
                assert "loaded from disk and donated set" in support.line_of(engine, rank)
            assert leased(agents) == {process.pid for process in engine.schedulers()}
            tokens = engine.tokens(PROMPT)
        shards = [agent.status().sets[0] for agent in agents]
        assert [held.fingerprint.tp_rank for held in shards] == list(RANKS)
        assert shards[0].digest != shards[1].digest

        with two_ranks(where, tiny_model, tmp_path / "attached") as engine:
            for rank in RANKS:
                assert "attached set" in support.line_of(engine, rank)
            assert leased(agents) == {process.pid for process in engine.schedulers()}
            for agent in agents:
                (lease,) = agent.status().sets[0].leases
                memory = support.memory_of(lease.pid)
                assert memory.inodes == agent.inodes()
                assert {mapping.permissions for mapping in memory.arenas} == {"r--p"}
            assert engine.tokens(PROMPT) == tokens

        agents[1].stop()
        engine = two_ranks(where, tiny_model, tmp_path / "disk")
        with support.until_decided(engine, RANKS) as lines:
            for line in lines:
                assert "loaded from disk: " in line
            for process in engine.schedulers():
                assert support.memory_of(process.pid).arenas == ()
            assert agents[0].status().sets[0].leases == ()

    with ExitStack() as stack:
        agents = [stack.enter_context(together(runtime_dir, tiny_model, rank)) for rank in RANKS]
        agents[1].load()
        loaded = [agent.await_state("ready").sets[0] for agent in agents]
        assert [held.fingerprint for held in loaded] == [held.fingerprint for held in shards]
        assert [held.digest for held in loaded] == [held.digest for held in shards]
        assert loaded[0].group == loaded[1].group

        with two_ranks(where, tiny_model, tmp_path / "loaded") as engine:
            for rank in RANKS:
                assert "attached set" in support.line_of(engine, rank)
            assert leased(agents) == {process.pid for process in engine.schedulers()}
            assert engine.tokens(PROMPT) == tokens
            agents[0].kill()
            agents[0].await_answer()
            eventually(lambda: len(agents[0].status().sets[0].leases) == 1, 20, "the lease is not renewed")
            assert engine.tokens(PROMPT) == tokens

            bring_back(agents)
            assert leased(agents[:1]) < {process.pid for process in engine.schedulers()}
            assert engine.tokens(PROMPT) == tokens
        again = [agent.status().sets for agent in agents]
        assert [[(held.group, held.digest) for held in sets] for sets in again] == [
            [(held.group, held.digest)] for held in loaded
        ]
        assert [sets[0].id == held.id for sets, held in zip(again, loaded, strict=True)] == [True, False]

        engine = two_ranks(where, tiny_model, tmp_path / "brought-back")
        with support.until_decided(engine, RANKS) as lines:
            for line in lines:
                assert "attached set" in line
            assert leased(agents) == {process.pid for process in engine.schedulers()}
