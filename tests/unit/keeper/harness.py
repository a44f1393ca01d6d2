"""A keeper in a process of its own, and questions to the agent below it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.keeper import probe

FOLDER = Path(__file__).parent
PYTHON = [sys.executable, "-I", "-S"]
AGENT = [*PYTHON, str(FOLDER / "fake_agent.py")]
KEEPER = [*PYTHON, str(probe.KEEPER)]
PROBE = [*PYTHON, str(FOLDER / "probe.py")]
SECONDS = 10.0


def eventually(condition: Callable[[], Any]) -> Any:
    """Poll ``condition`` until it is true; returns its value."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)
    return value


def reaped(pid: int) -> bool:
    """Whether a process is not even a zombie any more."""
    return not Path(f"/proc/{pid}").exists()


def kill(pid: int) -> None:
    """Kill a process, and wait until it can take no connection any more."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: reaped(pid))


class Rig:
    """One keeper on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run" / "agent.sock"
        self.dump = folder / "dump"
        self.log = folder / "log"
        self.keepers: list[subprocess.Popen[bytes]] = []
        self.environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(folder)}

    def start(self, *options: str, keeper: list[str] = KEEPER, command: list[str] = AGENT, **keywords: Any) -> None:
        """Start a keeper with a listener and a short delay."""
        arguments = [*keeper, "--listen", str(self.path), "--restart-delay", "0.05", *options, "--", *command]
        self.run(arguments, **keywords)

    def run(self, arguments: list[str], environment: dict[str, str] | None = None, **keywords: Any) -> None:
        """Start a process whose output is the log."""
        with self.log.open("ab") as log:
            self.keepers.append(
                subprocess.Popen(
                    arguments,
                    env=self.environment | (environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    **keywords,
                )
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.keepers[-1]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def connect(self) -> socket.socket:
        """A connection."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(SECONDS)
        try:
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            raise
        return sock

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The agent's answer."""
        with self.connect() as sock:
            sock.send(json.dumps([verb, *arguments]).encode())
            return answer(sock)

    def ready(self) -> dict[str, Any]:
        """The state of the first agent, once it answers."""
        eventually(self._answers)
        return self.state()

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def kill(self) -> dict[str, Any]:
        """Kill the agent; returns the state of the next one."""
        kill(self.state()["pid"])
        return self.state()

    def contents(self) -> dict[str, list[str]]:
        """What the next agent gets."""
        return self.kill()["contents"]

    def look(self) -> dict[str, list[str]]:
        """What a probed keeper has imported and opened."""
        self.dump.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGWINCH)
        eventually(self.dump.exists)
        return json.loads(self.dump.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The keeper's exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def close(self) -> None:
        """End everything."""
        for process in self.keepers:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def answer(sock: socket.socket) -> Any:
    return json.loads(sock.recv(1 << 20))


def stopped(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
