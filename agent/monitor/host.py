"""What the agents cannot know: devices by NVML, processes by psutil, requests by the engines' own servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightcache.monitor.snapshot import Device, Engine
from weightcache.monitor.view import RankView


@dataclass(frozen=True, slots=True)
class Facts:
    """The latest findings. ``problem`` says in one sentence why there are no device facts, or is empty."""

    driver: str = ""
    problem: str = ""
    devices: tuple[Device, ...] = ()
    engines: tuple[Engine, ...] = ()


Gather = Callable[[Sequence[RankView]], Facts]
"""Finds the facts for these ranks; may take its time, hang in a driver, or raise."""


class Host:
    """Gathers in a thread of its own, every so many seconds, for the ranks that were last asked about."""

    def __init__(self, gather: Gather, seconds: float) -> None:
        self._gather = gather
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ranks: Sequence[RankView] = ()
        self._facts = Facts()
        self._wanted = threading.Event()
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._gathered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host", daemon=True)
        self._thread.start()

    def now(self, ranks: Sequence[RankView]) -> Facts:
        """The latest facts; the next ones will be about ``ranks``."""
        with self._lock:
            self._ranks = ranks
            self._wanted.set()
            return self._facts

    def wait(self, seconds: float) -> None:
        """Wait for the first facts about ranks that were asked for, at most ``seconds``."""
        self._gathered.wait(seconds)

    def pace(self, seconds: float) -> None:
        """Gather every so many seconds from now on."""
        self._seconds = seconds
        self._hurry.set()

    def close(self) -> None:
        """End the thread, or leave it behind where it hangs."""
        self._closing.set()
        self._wanted.set()
        self._hurry.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        self._wanted.wait()
        while not self._closing.is_set():
            with self._lock:
                ranks = self._ranks
            try:
                facts = self._gather(ranks)
            except Exception as error:  # noqa: BLE001 - without this thread the last facts would stay, as if true
                why = f"{type(error).__name__}: {error}"
                facts = Facts(problem=f"devices and processes could not be looked at ({why})")
            with self._lock:
                self._facts = facts
            self._gathered.set()
            self._hurry.wait(self._seconds)
            self._hurry.clear()
