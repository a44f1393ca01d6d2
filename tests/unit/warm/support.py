"""A launcher in restart mode over a stand-in for SGLang whose processes say how they look from inside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.unit.launch.support import SOURCE, alive, eventually, free_port

FAKE = Path(__file__).parent / "fake"
SECONDS = 60.0
PARKED = "warm worker parked"
QUICK = (
    "import sys; from weightcache.launch import main, restart; "
    "restart.PARK_AFTER = restart.FIRST_PAUSE = restart.ATTEND_SECONDS = 0.1"
)
"""A launcher that parks at once and loses no time."""


class Launched:
    """``wcache-launch --wcache-restart`` with its log; ``states`` asks main process, scheduler and detokenizer."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self.arguments = ("--model-path", "m", "--port", str(self.port), *arguments)
        runtime = folder / "run"
        runtime.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "WEIGHTCACHE", "FAKE"))}
        self.environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(FAKE), str(SOURCE)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **{f"WEIGHTCACHE_{name}_DIR": str(runtime) for name in ("RUNTIME", "STATE", "CACHE")},
            "TMPDIR": str(runtime),
            **variables,
        }
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        options = [argument for argument in self.arguments if argument.startswith("--wcache")]
        rest = [argument for argument in self.arguments if argument not in options]
        code = f"{QUICK}; raise SystemExit(main.main(sys.argv[1:]))"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--wcache-restart", "--wcache-without=caches", *options, *rest],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        assert eventually(lambda: not any(map(alive, family)), 20), self.text()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def said(self) -> list[str]:
        """The launcher's own lines."""
        return [line[13:] for line in self.text().splitlines() if line.startswith("weightcache: ")]

    def wait_for(self, pattern: str, times: int = 1) -> None:
        def found() -> bool:
            return len(re.findall(pattern, self.text())) >= times

        assert eventually(lambda: found() or self.process.poll() is not None, SECONDS), self.text()
        assert found(), self.text()

    def states(self) -> list[dict[str, Any]]:
        """Asked anew until the server answers."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                    text = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                return list(json.loads(text))
            except (OSError, ValueError):
                assert self.process.poll() is None, self.text()
                assert time.monotonic() < deadline, self.text()
                time.sleep(0.02)

    def parked(self) -> int:
        """The parked main process."""
        for pid in children(self.process.pid):
            if b"weightcache.warm\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError(self.text())

    def family(self) -> list[int]:
        """Every process below the launcher, and itself."""
        found = [self.process.pid]
        for pid in found:
            found += children(pid)
        return found

    def after(self, kill: Callable[[list[dict[str, Any]]], int]) -> list[dict[str, Any]]:
        """The states after the process that ``kill`` chooses from them was killed."""
        before = self.states()
        os.kill(kill(before), signal.SIGKILL)
        assert eventually(lambda: not alive(before[0]["pid"]), 20)
        return self.states()


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names of what is not the same."""
    return {name for name in before if before[name] != after[name]}
