"""One model on two hosts: both ranks publish as one launch, and what ends one host's loader ends the other's.

A host whose agent is asked for nothing looks out for the other one's loads, and goes on with what it holds where only
the other one has lost something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import pytest

from tests.support.agent import Agent, eventually
from tests.support.engine import CPU_ARGUMENTS, end_with_parent
from tests.support.environments import NEWEST, engine_variables, environments
from tests.support.netns import Host, two_hosts
from tests.unit.engine.fakes import FakeAgent, Peer
from weightcache import protocol
from weightcache.paths import RankPaths

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]

PORT = 29600
LOAD_SECONDS = 240.0
M = TypeVar("M")


def needed() -> dict[str, str]:
    """What SGLang needs for two ranks on the CPU."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "SGLANG_NCCL_SO_PATH": "/nonexistent/nccl",
    }


def take(peer: Peer, message: protocol.Message) -> None:
    """An agent that takes every publication."""
    match message:
        case protocol.Begin():
            peer.send(protocol.Accepted())
        case protocol.Publish():
            peer.send(protocol.Published("a-set"))
        case protocol.Commit():
            peer.send(protocol.Committed(("a-set",)))


class Node:
    """A host's loader with its only rank, and that rank's agent, as far as a loader sees it."""

    def __init__(self, host: Host, node: int, hosts: tuple[Host, Host], model: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
        self.agent = FakeAgent(RankPaths(self.folder, node).publish, take)
        self.log = self.folder / "log"
        variables = {**engine_variables(), **needed(), "WEIGHTCACHE_TOKEN": "a-token"}
        command = [
            *host.command,
            *(str(environments().engine()), "-m", "weightcache.loader", "load", "--backend", "host"),
            *("--socket-dir", str(self.folder), "--ranks", str(node), "--group", f"group-{node}"),
            *("--arena-bytes", "0", "--node", str(node), "--nodes", ",".join(other.address for other in hosts)),
            *("--meet-port", str(PORT), "--meet-seconds", "60", "--"),
            *("--model-path", str(model), *CPU_ARGUMENTS),
            *("--tp-size", "2", "--nnodes", "2", "--node-rank", str(node)),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def text(self) -> str:
        """The log."""
        return self.log.read_text(errors="replace")

    def seen(self, kind: type[M]) -> list[M]:
        """What the agent was told."""
        return [message for message in self.agent.seen if isinstance(message, kind)]

    def wait(self, seconds: float) -> int:
        """The loader's exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()[-4000:]) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.agent.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def nodes(tiny_model: Path, sglang_version: str) -> Iterator[tuple[Node, Node]]:
    """Two loaders of one launch, started at once."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        started = [stack.enter_context(Node(host, node, hosts, tiny_model)) for node, host in enumerate(hosts)]
        yield started[0], started[1]


def test_both_ranks_publish_as_one_launch(nodes: tuple[Node, Node]) -> None:
    assert [node.wait(LOAD_SECONDS) for node in nodes] == [0, 0], "\n".join(node.text()[-4000:] for node in nodes)
    fingerprints = []
    for node in nodes:
        (begin,) = node.seen(protocol.Begin)
        assert (begin.group, begin.token) == ("group-0", "a-token")
        (publish,) = node.seen(protocol.Publish)
        fingerprints.append(publish.set.fingerprint)
        assert [commit.sets for commit in node.seen(protocol.Commit)] == [1]
        assert node.seen(protocol.Abort) == []
    assert [(found.tp_size, found.tp_rank) for found in fingerprints] == [(2, 0), (2, 1)]


def test_a_loader_that_is_killed_ends_the_other(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    eventually(lambda: second.seen(protocol.Begin), LOAD_SECONDS, second.text)
    second.process.kill()
    started = time.monotonic()
    assert first.wait(30) == 1
    assert time.monotonic() - started < 10
    said = "the loader of node 1 (10.213.77.2) vanished (the connection was closed)"
    assert first.text().splitlines()[-1] == f"weightcache-loader: {said}"
    # The rank itself, which noticed that a connection was closed, and the loader: an agent listens to the first.
    assert {abort.message for abort in first.seen(protocol.Abort)} == {said}, first.text()[-4000:]
    assert first.seen(protocol.Commit) == []


@pytest.fixture
def agents(tiny_model: Path, runtime_dir: Path, sglang_version: str) -> Iterator[tuple[Agent, Agent]]:
    """An agent on each of two hosts."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        deployment = {"tp_size": 2, "nodes": [host.address for host in hosts], "port": PORT, "meet_seconds": 120}
        started = [
            stack.enter_context(
                Agent(
                    runtime_dir,
                    rank=rank,
                    model=tiny_model,
                    variables=needed(),
                    deployment=deployment,
                    within=host.command,
                )
            )
            for rank, host in enumerate(hosts)
        ]
        yield started[0], started[1]


def test_a_load_on_one_host_loads_on_both_what_is_not_there(agents: tuple[Agent, Agent]) -> None:
    first, second = agents
    second.load()
    loaded = [agent.await_state("ready").sets[0] for agent in agents]
    assert loaded[0].group == loaded[1].group
    assert [held.fingerprint.tp_rank for held in loaded] == [0, 1]
    assert "node 1 (10.213.77.2) waits with a load of all hosts: this one takes part" in first.text()

    second.stop()
    second.start()
    assert second.status().sets == ()
    second.load()
    again = [agent.await_state("ready").sets[0] for agent in agents]
    found = [(held.group, held.digest) for held in again]
    assert found == [(held.group, held.digest) for held in loaded], first.text()[-8000:]
    assert [now.id == held.id for now, held in zip(again, loaded, strict=True)] == [True, False]
    assert "this rank goes on with its target weights of load" in first.text()
