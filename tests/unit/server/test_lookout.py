"""A load on one host makes the other hosts load, which look for it themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import test_loader
from tests.unit.loader.nodes import free_port
from tests.unit.server.harness import Agent, eventually, gone
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.loader.gathering import ADVICE

NODES = ("127.0.0.1", "127.0.0.2")
SECONDS = 40.0
"""For what has to be looked for first, every few seconds."""


class Hosts:
    """Two hosts with one rank each, by their addresses on this one."""

    def __init__(self, folder: Path, named: Path) -> None:
        self.agents = []
        for rank in range(len(NODES)):
            (folder / str(rank)).mkdir()
            self.agents.append(Agent(folder / str(rank), named, rank))
        self.pool = ThreadPoolExecutor(4)
        self.port = free_port()
        self.configure()

    def configure(self, **deployment: Any) -> None:
        table = {"tp_size": 2, "nodes": list(NODES), "port": self.port, "meet_seconds": SECONDS} | deployment
        for agent in self.agents:
            agent.configure(deployment=table)

    def start(self) -> None:
        for agent in self.agents:
            agent.start()

    def load(self, host: int, again: bool = False) -> Future[str]:
        def load() -> str:
            with Conversation(self.agents[host].paths.public) as conversation:
                request = protocol.Load(SECONDS, again)
                return str(conversation.request(request, protocol.Loaded, SECONDS + 5).set_id)

        return self.pool.submit(load)

    def groups(self) -> list[list[str]]:
        return [[resident.group for resident in agent.status().sets] for agent in self.agents]

    def one_group(self) -> str:
        """The load that both hosts hold, and nothing else, once they do."""

        def found() -> str:
            first, second = self.groups()
            return first[0] if len(first) == 1 and first == second else ""

        return str(eventually(found, SECONDS, f"never one load: {self.groups()}"))

    def looks_out(self, host: int, but: int = 0) -> int:
        """Wait until a host looks out; the process, another one than ``but``."""

        def found() -> int:
            for unit in _children(self.agents[host].pid):
                for child in _children(unit):
                    if child != but and b"lookout" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return child
            return 0

        return int(eventually(found, SECONDS, f"host {host} does not look out: {self.agents[host].text()}"))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.pool.shutdown()


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


@pytest.fixture
def hosts(runtime_dir: Path, named: Path) -> Iterator[Hosts]:
    made = Hosts(runtime_dir, named)
    yield made
    made.close()


@pytest.mark.parametrize("asked", range(len(NODES)))
def test_a_load_on_one_host_is_a_load_on_both(hosts: Hosts, asked: int) -> None:
    hosts.start()
    hosts.load(asked).result(SECONDS)
    first = hosts.one_group()
    other = hosts.agents[1 - asked].text()
    assert f"node {asked} ({NODES[asked]}) waits with a load of all hosts: this one takes part" in other
    hosts.load(asked, again=True).result(SECONDS)
    assert hosts.one_group() != first


def test_who_does_not_follow_is_named(hosts: Hosts) -> None:
    hosts.configure(follow=False, meet_seconds=8)
    hosts.start()
    error = hosts.load(0).exception(SECONDS)
    assert f"node 1 (127.0.0.2, ranks 1) did not come within 8 s; {ADVICE}" in str(error)
    assert _children(hosts.agents[1].pid) == []
    assert hosts.groups() == [[], []]


def test_what_an_engine_uses_is_not_replaced(hosts: Hosts) -> None:
    """The other host waits; when the engine has ended, this one takes part."""
    hosts.start()
    hosts.load(0).result(SECONDS)
    first = hosts.one_group()
    with hosts.agents[1].attach(test_loader.fingerprint(), wait=0.0):
        again = hosts.load(0, again=True)
        eventually(lambda: "1 engine uses its weights" in hosts.agents[1].text(), SECONDS, "it does not say why not")
        assert hosts.groups()[1] == [first]
        status = hosts.agents[1].status()
        assert (status.state, status.error) == ("ready", None)
    again.result(SECONDS)
    assert hosts.one_group() != first


def test_a_drained_host_does_not_look(hosts: Hosts) -> None:
    hosts.start()
    lookout = hosts.looks_out(1)
    hosts.agents[1].ask(protocol.Drain(0.0))
    eventually(lambda: gone(lookout), what="it looks out although it may not load")
    loading = hosts.load(0)
    hosts.agents[1].ask(protocol.Resume())
    loading.result(SECONDS)
    assert hosts.one_group()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_lookout_ends_with_its_agent(hosts: Hosts, sign: signal.Signals) -> None:
    hosts.start()
    lookout = hosts.looks_out(0)
    hosts.agents[0].stop(sign)
    eventually(lambda: gone(lookout), what="it looks out for nobody")


def test_a_lookout_that_is_killed_has_a_successor(hosts: Hosts) -> None:
    hosts.start()
    first = hosts.looks_out(1)
    os.kill(first, signal.SIGKILL)
    assert hosts.looks_out(1, but=first)
    assert "would not be joined: the lookout ended with signal 9 (SIGKILL)" in hosts.agents[1].text()
    hosts.load(0).result(SECONDS)
    assert hosts.one_group()
