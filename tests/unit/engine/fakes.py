"""Stand-ins for an agent, and for the parts of SGLang that the plugin sees."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support.test_loader import fingerprint, make
from weightcache import protocol, transport
from weightcache.engine.directive import Directive
from weightcache.fingerprint import Fingerprint
from weightcache.paths import RankPaths
from weightcache.protocol import ArenaInfo, Attached, Message

Script = Callable[["Peer", Message], None]


class Peer:
    """The agent's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Message, fds: Sequence[int] = (), announce: int | None = None) -> None:
        data = protocol.encode(message, len(fds) if announce is None else announce)
        transport.send_packet(self.sock, data, fds)

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass
class FakeAgent:
    """Listens on one door of a rank and runs ``script`` for every message."""

    path: Path
    script: Script
    seen: list[Message] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.peers.append(Peer(sock))
            self._threads.append(threading.Thread(target=self._serve, args=(self.peers[-1],)))
            self._threads[-1].start()

    def _serve(self, peer: Peer) -> None:
        with peer.sock, contextlib.suppress(OSError):
            while (packet := transport.receive_packet(peer.sock, transport.MAX_FDS)).data:
                packet.close()
                message = protocol.decode(packet.data, len(packet.fds))
                with self._changed:
                    self.seen.append(message)
                    self._changed.notify_all()
                self.script(peer, message)

    def wait(self, count: int, seconds: float = 5) -> None:
        """Until ``count`` messages came."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, seconds), self.seen

    def close(self) -> None:
        """Stop as a killed agent does: every connection ends and the sockets stay behind."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers:
            peer.close()
        for thread in self._threads:
            thread.join(5)
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def agent(path: Path, script: Script) -> Iterator[FakeAgent]:
    fake = FakeAgent(path, script)
    try:
        yield fake
    finally:
        fake.close()


def offering(fingerprint_: Fingerprint | None = None) -> Script:
    """Answers every Attach with a small set."""

    def script(peer: Peer, message: Message) -> None:
        made = make(fingerprint_ or fingerprint())
        try:
            peer.send(Attached("a-set", "target", "a-lease", made.info.arenas), made.fds)
        finally:
            transport.close_all(made.fds)

    return script


def answering(*messages: Message) -> Script:
    def script(peer: Peer, message: Message) -> None:
        for answer in messages:
            peer.send(answer)

    return script


def directive(paths: RankPaths | None = None, **changes: Any) -> Directive:
    sockets = {"rank:0": str(paths.public)} if paths else {}
    return Directive(**({"purpose": "engine", "backend": "host", "sockets": sockets, "group": "g"} | changes))


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def topology(**changes: int) -> SimpleNamespace:
    """SGLang's parallel topology of one rank."""
    sizes = {"tp_size": 1, "pp_size": 1, "moe_ep_size": 1, "attn_dp_size": 1, "attn_cp_size": 1, "moe_dp_size": 1}
    ranks = {"tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    return SimpleNamespace(**(sizes | ranks | changes))


def model_config(directory: Path, **changes: Any) -> SimpleNamespace:
    """SGLang's ModelConfig, as far as the plugin reads it."""
    hf = SimpleNamespace(architectures=["X"], quantization_config=None)
    values = {
        "model_path": str(directory), "hf_config": hf, "revision": None, "quantization": None,
        "dtype": torch.bfloat16, "is_draft_model": False,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def load_config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"load_format": "auto", "draft_model_idx": None} | changes))


class DefaultModelLoader:
    """SGLang's loader."""

    def __init__(self, make_model: Callable[[], nn.Module], on_built: list[Callable[[nn.Module], None]]) -> None:
        self.load_config = load_config()
        self.make_model = make_model
        self.on_built = on_built
        self.loads = 0
        self.some_attribute = "inner"

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        self.loads += 1
        model: Any = self.make_model()
        for callback in self.on_built:
            callback(model)
        model.load()
        return model.eval()


def arenas(*sizes: int) -> tuple[ArenaInfo, ...]:
    return tuple(ArenaInfo(size, size, "0" * 32) for size in sizes)
