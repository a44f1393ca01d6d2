"""What the loaders of some agents do: how many there are, and how much they and all below them really read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

EVERY_SECONDS = 0.1
LOADER = ["-m", "weightcache.loader", "load"]


class LoaderWatch:
    """Samples /proc below agents' keepers while a block runs; what agents themselves read is a few kilobytes.

    Threads are counted, not processes: a process's own numbers also hold those of its children once they have ended.
    What was read between the last sample and the end of a process is missing.
    """

    def __init__(self, keepers: Sequence[int]) -> None:
        self._keepers = keepers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._read: dict[tuple[int, int], tuple[int, int]] = {}
        self.loaders: set[int] = set()

    @property
    def called(self) -> int:
        """Bytes that read(2) and its like returned: mapped files are not in it."""
        return sum(called for called, _ in self._read.values())

    @property
    def device(self) -> int:
        """Bytes that came from disks: what was in the page cache is not in it."""
        return sum(device for _, device in self._read.values())

    def _run(self) -> None:
        while not self._stop.is_set():
            for keeper in self._keepers:
                with contextlib.suppress(psutil.Error):
                    for process in psutil.Process(keeper).children(recursive=True):
                        self._sample(process)
            self._stop.wait(EVERY_SECONDS)

    def _sample(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:4] == LOADER and process.ppid() not in self.loaders:
                self.loaders.add(process.pid)
        self._count(process.pid)

    def _count(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    rows = dict(line.split(": ") for line in (thread / "io").read_text().splitlines())
                    self._read[pid, int(thread.name)] = int(rows["rchar"]), int(rows["read_bytes"])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
