"""`wcache-top` as a function and as a process, on a host of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor.made import eventually
from tests.unit.server.conftest import agent, named  # noqa: F401
from weightcache.tui.main import main

DESCRIPTORS = Path("/proc/self/fd")
SCRIPT = "import sys; from weightcache.tui.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


class Top:
    """One host: ``run`` holds the sockets."""

    def __init__(self, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.run = run
        self.config = run / "weightcache.toml"
        self.config.write_text('[memory]\nbackend = "host"\n')
        self._capfd = capfd

    @property
    def where(self) -> list[str]:
        return ["--config", str(self.config), "--runtime-dir", str(self.run)]

    def __call__(self, *arguments: str) -> Result:
        self._capfd.readouterr()
        status = main([*self.where, *arguments])
        return Result(status, *self._capfd.readouterr())

    def process(self, *arguments: str, script: str = SCRIPT, **popen: Any) -> subprocess.Popen[str]:
        """A process of its own, with pipes."""
        popen.setdefault("stdout", subprocess.PIPE)
        popen.setdefault("stdin", subprocess.DEVNULL)
        command = [sys.executable, "-c", script, *self.where, *arguments]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **popen)


@pytest.fixture
def top(runtime_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Top:
    for name in ("WEIGHTCACHE_TRACEBACK", "WEIGHTCACHE_RUNTIME_DIR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Top(runtime_dir, capfd)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Threads and descriptors of a test have ended with it."""
    before, descriptors = set(threading.enumerate()), len(list(DESCRIPTORS.iterdir()))
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t not in before], 8)
    eventually(lambda: len(list(DESCRIPTORS.iterdir())) <= descriptors, 2)
