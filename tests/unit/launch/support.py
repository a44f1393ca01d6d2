"""A launcher in a subprocess, over a stand-in for SGLang and a stand-in for an agent."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import weightcache
from weightcache import protocol, transport
from weightcache.fingerprint import Fingerprint
from weightcache.paths import RankPaths

FAKE = Path(__file__).parent / "fake"
SOURCE = Path(weightcache.__file__).parent.parent

FINGERPRINT = Fingerprint(
    schema=1, role="target", model_path="/models/a", model_arch="LlamaForCausalLM", revision="", checkpoint="c" * 32,
    override_args="", load_format="auto", tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, dp_size=1, ep_size=1, ep_rank=0,
    attention_dp=1, attention_cp_size=1, moe_dp_size=1, quant_method="", quant_config_hash="", dtype="bfloat16",
    device="cpu", device_capability="", torch_version="2", sglang_version="0", kernel_versions="", backends="",
    environment="", plugins="",
)  # fmt: skip


def set_status(**changes: Any) -> protocol.SetStatus:
    values = {
        "id": "1a2b" * 8, "role": "target", "model": "/models/a", "revision": "", "version": 1, "bytes": 270_000_000,
        "arenas": 1, "tensors": 272, "fingerprint": FINGERPRINT, "digest": "0" * 32, "published_at": 1.0,
        "load_seconds": 1.0, "bytes_read": 1, "leases": (),
    }  # fmt: skip
    return protocol.SetStatus(**{**values, **changes})


def rank_status(**changes: Any) -> protocol.RankStatus:
    values = {
        "rank": 0, "state": "ready", "backend": "host", "gpu_uuid": "", "version": weightcache.__version__, "pid": 1,
        "uptime_seconds": 1.0, "model": "/models/a", "sets": (set_status(),), "orphans": (), "progress": None,
        "error": None, "drained": None,
    }  # fmt: skip
    return protocol.RankStatus(**{**values, **changes})


@dataclass
class FakeAgent:
    """Answers Hello, Status and Load of one rank; ``doors`` says on which sockets."""

    where: RankPaths
    status: protocol.RankStatus
    doors: tuple[str, ...] = ("public", "status")
    silent: bool = False
    seen: list[protocol.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        for door in self.doors:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(str(getattr(self.where, door)))
            listener.listen()
            self._listeners.append(listener)
            self._run(self._accept, listener)

    def _run(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            if not self.silent:
                self._run(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (packet := transport.receive_packet(connection)).data:
                message = protocol.decode(packet.data)
                self.seen.append(message)
                for answer in self.answers(message):
                    transport.send_packet(connection, protocol.encode(answer))
        except OSError:
            return

    def answers(self, message: protocol.Message) -> list[protocol.Message]:
        status = self.status
        if isinstance(message, protocol.Status):
            return [protocol.RankReport(status)]
        if isinstance(message, protocol.Load):
            self.status = replace(status, state="ready", sets=(set_status(),))
            progress = protocol.LoadProgress("loading", 1_000_000_000, 2_000_000_000, 3.0)
            return [protocol.Progress(progress), protocol.Loaded("1a2b" * 8)]
        return [protocol.Welcome(status.version, status.rank, status.state, status.backend, status.gpu_uuid)]

    def close(self) -> None:
        for sock in (*self._listeners, *self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)


@dataclass
class Launcher:
    """Runs wcache-launch in a subprocess."""

    directory: Path
    runtime_dir: Path
    environment: dict[str, str]

    def script(self, *steps: list[Any], again: list[list[Any]] | None = None) -> None:
        plan: dict[str, Any] = {"directory": str(self.directory), "steps": steps}
        if again is not None:
            plan["again"] = again
        self.environment["FAKE_SGLANG"] = json.dumps(plan)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "weightcache.launch", *arguments],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=self.directory, **options,
        )  # fmt: skip

    def run(self, *arguments: str, timeout: float = 30) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=timeout)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob("run-*.json"))]

    def wait_for(self, name: str, timeout: float = 20) -> Path:
        path = self.directory / name
        deadline = time.monotonic() + timeout
        while not path.exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)
        return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], timeout: float = 10) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


ATTACHED = {
    "rank": 0, "role": "target", "outcome": "attached", "set_id": "1a2b" * 8, "tensors": 272, "arenas": 1,
    "mapped_bytes": 270_000_000, "milliseconds": {"receive": 1, "map": 2, "build": 40, "bind": 12},
}  # fmt: skip
GOOD = [["ready", "main"], ["ready", "scheduler"], ["decision", ATTACHED]]
"""What a server does that attaches."""
