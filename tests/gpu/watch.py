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

    A process's numbers hold those of its threads and children that have ended, so that the sum over those that live is
    what all of them have read; the most that was seen counts, because a parent may not have waited for its child.
    """

    def __init__(self, keepers: Sequence[int]) -> None:
        self._keepers = keepers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._called = dict.fromkeys(keepers, 0)
        self._device = dict.fromkeys(keepers, 0)
        self.loaders: set[int] = set()

    @property
    def called(self) -> int:
        """Bytes that read(2) and its like returned: mapped files are not in it."""
        return sum(self._called.values())

    @property
    def device(self) -> int:
        """Bytes that came from disks: what was in the page cache is not in it."""
        return sum(self._device.values())

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self._sample()

    def _sample(self) -> None:
        for keeper in self._keepers:
            called = device = 0
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(keeper).children(recursive=True):
                    self._recognize(process)
                    with contextlib.suppress(OSError):
                        io = Path(f"/proc/{process.pid}/io").read_text()
                        rows = dict(line.split(": ") for line in io.splitlines())
                        called, device = called + int(rows["rchar"]), device + int(rows["read_bytes"])
            self._called[keeper] = max(self._called[keeper], called)
            self._device[keeper] = max(self._device[keeper], device)

    def _recognize(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:4] == LOADER and process.ppid() not in self.loaders:
                self.loaders.add(process.pid)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._sample()
