"""Loaders of several nodes on one machine: each has a loopback address, fake agents, and a child that is no SGLang."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.environments import REPOSITORY
from tests.unit.engine.fakes import FakeAgent, Peer
from weightcache import protocol
from weightcache.paths import RankPaths

SECONDS = 20.0
"""Longer than anything here takes."""


def free_port() -> int:
    """A port, and the one after it, that are free on all loopback addresses; no connection gets them by chance."""
    while True:
        port = random.randrange(12000, 20000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as next_one:
            one.bind(("", port))
            next_one.bind(("", port + 1))
            return port


def eventually(condition: Callable[[], object], what: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _publisher(peer: Peer, message: protocol.Message) -> None:
    if isinstance(message, protocol.Begin):
        peer.send(protocol.Accepted())


class Node:
    """One loader and the agents of its ranks."""

    def __init__(
        self,
        folder: Path,
        node: int,
        nodes: Sequence[str],
        port: int,
        *,
        ranks: Mapping[int, int],
        child: str = "well",
        seconds: float = SECONDS,
        arguments: Sequence[str] = ("--model-path", "org/m"),
        tokens: str = "abc",
    ) -> None:
        self.folder = folder / str(node)
        self.folder.mkdir()
        self.agents = {agent: FakeAgent(RankPaths(self.folder, agent).publish, _publisher) for agent in ranks.values()}
        self.log = self.folder / "log"
        several = ["--node", str(node), "--nodes", ",".join(nodes), "--meet-port", str(port)]
        command = [
            *(sys.executable, "-m", "tests.unit.loader.node_program", child),
            *("load", "--backend", "host", "--socket-dir", str(self.folder), "--group", f"group-{node}"),
            *("--ranks", ",".join(f"{rank}:{agent}" for rank, agent in ranks.items()), "--arena-bytes", "0"),
            *((*several, "--meet-seconds", str(seconds)) if nodes else ()),
            *("--", *arguments),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "WEIGHTCACHE_TOKEN": tokens},
                cwd=REPOSITORY,
            )

    def text(self) -> str:
        return self.log.read_text()

    def says(self, word: str) -> str:
        """Wait for a line that starts with ``word``; the rest of it."""
        eventually(lambda: any(line.startswith(word) for line in self.text().splitlines()), self.text)
        return next(line for line in self.text().splitlines() if line.startswith(word)).removeprefix(word).strip()

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def told(self) -> dict[int, list[tuple[str, str]]]:
        """What each agent was told: code and sentence."""
        return {
            number: [(message.code, message.message) for message in agent.seen if isinstance(message, protocol.Abort)]
            for number, agent in self.agents.items()
        }

    def begun(self) -> list[protocol.Begin]:
        return [
            message for agent in self.agents.values() for message in agent.seen if isinstance(message, protocol.Begin)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for agent in self.agents.values():
            agent.close()


@contextlib.contextmanager
def strangers(*addresses: tuple[str, int]) -> Iterator[list[socket.socket]]:
    """Connections by somebody who is no loader; they wait until somebody listens."""
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []
        for address in addresses:
            eventually(lambda address=address: _connected(address, socks, stack))  # type: ignore[misc]
        yield socks


def _connected(address: tuple[str, int], socks: list[socket.socket], stack: contextlib.ExitStack) -> bool:
    try:
        socks.append(stack.enter_context(socket.create_connection(address, SECONDS)))
    except ConnectionRefusedError:
        return False
    return True
