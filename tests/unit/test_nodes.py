"""Which node of a deployment this host is."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from weightcache import nodes
from weightcache.errors import ConfigError

NOWHERE = "198.51.100.1"
"""No host has it (RFC 5737)."""


@pytest.fixture(autouse=True)
def name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b.cluster")


def refusal(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        nodes.this_node(*arguments)  # type: ignore[arg-type]
    return caught.value.message


@pytest.mark.parametrize("entry", ["gpu-b.cluster", "gpu-b", "GPU-B.Cluster.", "127.0.0.1", "::1", "localhost"])
def test_by_name_or_address(entry: str) -> None:
    assert nodes.this_node(["gpu-a", entry, NOWHERE] if "." not in entry else [NOWHERE, entry], environment={}) == 1


def test_a_short_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b")
    assert nodes.this_node(["gpu-a.cluster", "gpu-b.cluster"], environment={}) == 1


def test_names_are_not_looked_up_where_one_is_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked"))
    assert nodes.this_node(["gpu-b", "gpu-a"], environment={}) == 0


def test_what_is_said_counts() -> None:
    assert nodes.this_node(["gpu-b", "x"], 1, {nodes.VARIABLE: "0"}) == 1
    assert nodes.this_node(["gpu-b", "x"], None, {nodes.VARIABLE: "1"}) == 1
    assert nodes.this_node([], None, {}) == 0
    assert nodes.this_node([], 0, {}) == 0
    assert nodes.this_node(["anything"], None, {}) == 0


def test_one_sentence_for_everything_else() -> None:
    none = refusal([NOWHERE, "gpu-b.elsewhere.invalid"], None, {})
    assert none.startswith(
        f"deployment.nodes: this host (gpu-b.cluster) is none of {NOWHERE}, gpu-b.elsewhere.invalid: "
    )
    assert nodes.VARIABLE in none
    assert "is 127.0.0.1 and localhost at the same time" in refusal(["127.0.0.1", "localhost"], None, {})
    assert "is gpu-b and gpu-b.cluster at the same time" in refusal(["gpu-b", "gpu-b.cluster"], None, {})
    assert refusal(["a", "b"], 2, {}) == "--node: there is no node 2: [deployment] has 2 nodes, 0 to 1"
    assert refusal([], 1, {}) == "--node: there is no node 1: [deployment] has one node, 0"
    assert "expected the number of a node, got 'x'" in refusal(["a", "b"], None, {nodes.VARIABLE: "x"})


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        answer.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    began = time.monotonic()
    assert nodes.addresses(["a", "b"], 0.1) == {"a": (), "b": ()}
    assert time.monotonic() - began < 2
    answer.set()
