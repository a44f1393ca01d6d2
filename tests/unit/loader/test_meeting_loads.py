"""Loaders of several nodes with a child that is no SGLang: how a load ends on one node, and then on all."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loader.nodes import Node, alive, eventually, free_port
from weightcache.loader.gathering import ADVICE

NODES = ("127.0.0.1", "127.0.0.2")
TOO_LITTLE = "40 GB are free, 80 are needed"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(stack: ExitStack, runtime_dir: Path) -> Any:
    """Starts two nodes with two ranks each, of which the agents have other numbers than the ranks."""

    def start(*children: str, **options: Any) -> list[Node]:
        port = free_port()
        ranks = ({0: 0, 1: 1}, {2: 12, 3: 13})
        tokens = ("abc", "12=def,13=ghi")
        return [
            stack.enter_context(
                Node(
                    runtime_dir, number, NODES, port, ranks=ranks[number], child=child, tokens=tokens[number], **options
                )
            )
            for number, child in enumerate(children)
        ]

    return start


def told(node: Node, code: str, text: str) -> None:
    """Every agent of a node got this sentence, and its last line says it, too."""
    assert node.told() == {agent: [(code, text)] for agent in node.agents}, node.text()
    assert node.text().splitlines()[-1] == f"weightcache-loader: {text}"


def test_both_publish_under_one_name_and_meet_at_one_port(pair: Any) -> None:
    nodes = pair("well", "well")
    assert [node.wait() for node in nodes] == [0, 0], [node.text() for node in nodes]
    addresses = set()
    for node in nodes:
        said = node.says("arguments")
        assert '"group": "group-0"' in said
        addresses.add(re.search(r"--dist-init-addr (\S+)", said).group(1))  # type: ignore[union-attr]
        assert node.told() == {agent: [] for agent in node.agents}
    (address,) = addresses
    assert address.startswith("127.0.0.1:")


def test_a_reason_on_one_node_is_told_to_the_agents_of_all(pair: Any) -> None:
    slow, failing = pair("leftover-slow", "reason")
    assert failing.wait() == 1
    told(failing, "no-room", TOO_LITTLE)
    assert slow.wait() == 1
    told(slow, "load-failed", f"node 1 (127.0.0.2): {TOO_LITTLE}")
    assert {begin.token for begin in failing.begun()} == {"def", "ghi"}
    assert {begin.group for begin in failing.begun() + slow.begun()} == {"group-0"}
    assert not alive(int(slow.says("child")))


def test_a_consequence_waits_for_its_cause(pair: Any) -> None:
    """Node 0 notices that a connection was closed before node 1 has said why."""
    first, second = pair("consequence", "slow")
    second.says("child")
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(), second.wait()) == (1, 1)
    told(second, "load-failed", "its loader was ended by SIGTERM")
    told(first, "load-failed", "node 1 (127.0.0.2): its loader was ended by SIGTERM")


def test_a_loader_that_is_killed_ends_the_other_node_within_seconds(pair: Any) -> None:
    first, second = pair("leftover-slow", "slow")
    pids = [int(node.says("child")) for node in (first, second)]
    second.process.kill()
    started = time.monotonic()
    assert first.wait() == 1
    assert time.monotonic() - started < 5
    told(first, "load-failed", "the loader of node 1 (127.0.0.2) vanished (the connection was closed)")
    eventually(lambda: not any(map(alive, pids)))


def test_the_first_node_is_killed(pair: Any) -> None:
    first, second = pair("slow", "slow")
    second.says("child")
    first.process.kill()
    assert second.wait() == 1
    told(second, "load-failed", "the loader of node 0 (127.0.0.1) vanished (the connection was closed)")


def test_a_model_that_is_not_there(pair: Any, tmp_path: Path) -> None:
    """Found in no time, and told: the other would wait for SGLang's rendezvous. Whoever is first tells the other."""
    missing = tmp_path / "none"
    nodes = pair("slow", "slow", arguments=("--model-path", str(missing)))
    statuses = [node.wait() for node in nodes]
    assert 66 in statuses
    for status, node in zip(statuses, nodes, strict=True):
        ((code, sentence),) = {reason for reasons in node.told().values() for reason in reasons}
        assert (status, code) in ((66, "checkpoint"), (1, "load-failed"))
        assert str(missing) in sentence
        assert "child" not in node.text()


def test_nobody_came(stack: ExitStack, runtime_dir: Path) -> None:
    port = free_port()
    node = stack.enter_context(Node(runtime_dir, 0, NODES, port, ranks={0: 0, 1: 1}, seconds=0.5))
    assert node.wait() == 1
    told(node, "load-failed", f"node 1 (127.0.0.2, ranks 2, 3) did not come within 0.5 s; {ADVICE}")
    assert "child" not in node.text()


def test_a_loader_that_waits_can_be_ended(stack: ExitStack, runtime_dir: Path) -> None:
    node = stack.enter_context(Node(runtime_dir, 1, NODES, free_port(), ranks={2: 2}))
    node.says("weightcache-loader: waiting for node 0")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("child", "code", "text"),
    [
        ("reason", "no-room", TOO_LITTLE),
        ("status", "load-failed", "SGLang ended with status 3 before the weights were published"),
        ("killed", "load-failed", "SGLang ended with signal SIGKILL before the weights were published"),
        ("leftover", "load-failed", "SGLang ended with status 1 before the weights were published"),
    ],
)
def test_one_host(stack: ExitStack, runtime_dir: Path, child: str, code: str, text: str) -> None:
    node = stack.enter_context(Node(runtime_dir, 0, (), 0, ranks={0: 4, 1: 5}, child=child))
    assert node.wait() == 1
    told(node, code, text)
    group = int(node.says("child"))
    assert not [pid for pid in _processes() if _group(pid) == group and alive(pid)]


def test_one_host_has_a_port_of_its_own(stack: ExitStack, runtime_dir: Path) -> None:
    node = stack.enter_context(Node(runtime_dir, 0, (), 0, ranks={0: 0}))
    assert node.wait() == 0
    port = int(re.search(r"--dist-init-addr 127.0.0.1:(\d+)", node.says("arguments")).group(1))  # type: ignore[union-attr]
    assert 10000 <= port < 22000 - 16


def test_ranks_that_make_no_sense(stack: ExitStack, runtime_dir: Path) -> None:
    node = stack.enter_context(Node(runtime_dir, 0, (), 0, ranks={}))
    assert node.wait() == 2
    assert "expected numbers such as 0,1 or 0:2,1:3" in node.text()


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1
