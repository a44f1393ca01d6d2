"""A fake agent in a thread, and `wcache` as a function."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from weightcache import paths, protocol, transport
from weightcache.cli.main import main
from weightcache.fingerprint import Fingerprint
from weightcache.protocol import ErrorInfo, LeaseStatus, LoadProgress, Message, RankStatus, SetStatus

Answer = Callable[[Message], Sequence[Message]]


def fingerprint() -> Fingerprint:
    kinds = {"int": 1, "str": "x"}
    return Fingerprint(**{field.name: kinds[str(field.type)] for field in dataclasses.fields(Fingerprint)})


def lease(**changes: object) -> LeaseStatus:
    base = LeaseStatus("l1", 4711, 0, "sglang.service", "python -m sglang.launch_server", time.time() - 61)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def weight_set(**changes: object) -> SetStatus:
    base = SetStatus(
        id="s1abcd",
        role="target",
        model="/models/small",
        revision="",
        version=1,
        bytes=269_000_000,
        arenas=1,
        tensors=213,
        fingerprint=fingerprint(),
        digest="0" * 32,
        published_at=time.time() - 3600,
        load_seconds=12.3,
        bytes_read=269_000_000,
        leases=(),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def status(rank: int = 0, state: str = "ready", **changes: object) -> RankStatus:
    base = RankStatus(
        rank=rank,
        state=state,
        backend="host",
        gpu_uuid="",
        version="0.1.0",
        pid=1,
        uptime_seconds=5.0,
        model="/models/small",
        sets=(weight_set(),) if state == "ready" else (),
        orphans=(),
        progress=LoadProgress("loading", 5_000_000_000, 16_400_000_000, 12.0) if state == "loading" else None,
        error=ErrorInfo("load-failed", "the loader was killed by signal 9") if state == "failed" else None,
        drained=None,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


class FakeAgent:
    """Answers every connection's packets with what ``answer`` returns; remembers what was asked."""

    def __init__(self, directory: Path, rank: int, answer: Answer) -> None:
        where = paths.RankPaths(directory, rank)
        self.asked: list[Message] = []
        self._answer = answer
        self._sockets = []
        for path in (where.public, where.status):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.bind(str(path))
            sock.listen(16)
            self._sockets.append(sock)
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError):
            while packet := transport.receive_packet(connection):
                if not packet.data:
                    return
                message = protocol.decode(packet.data)
                self.asked.append(message)
                for reply in self._answer(message):
                    transport.send_packet(connection, protocol.encode(reply))

    def close(self) -> None:
        for sock in self._sockets:
            # shutdown() wakes the accept() that close() alone would leave waiting.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


class Host:
    """A host with a runtime directory and a configuration file of its own."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.run = directory / "run"
        self.run.mkdir(mode=0o755)
        self.config = directory / "weightcache.toml"
        self.config.write_text('[memory]\nbackend = "host"\n[[rank]]\nrank = 0\n')
        self.agents: list[FakeAgent] = []
        self._capfd = capfd

    def agent(self, rank: int, *replies: Message, answer: Answer | None = None) -> FakeAgent:
        """Start an agent that answers everything with ``replies``, or as ``answer`` says."""
        agent = FakeAgent(self.run, rank, answer or (lambda _: replies))
        self.agents.append(agent)
        return agent

    def wcache(self, *arguments: str) -> Result:
        self._capfd.readouterr()
        code = main(["--config", str(self.config), "--runtime-dir", str(self.run), *arguments])
        captured = self._capfd.readouterr()
        return Result(code, captured.out, captured.err)


@pytest.fixture
def host(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.delenv("WEIGHTCACHE_TRACEBACK", raising=False)
    made = Host(tmp_path, capfd)
    yield made
    for agent in made.agents:
        agent.close()


@pytest.fixture
def make_status() -> Callable[..., RankStatus]:
    return status


@pytest.fixture
def make_set() -> Callable[..., SetStatus]:
    return weight_set


@pytest.fixture
def make_lease() -> Callable[..., LeaseStatus]:
    return lease
