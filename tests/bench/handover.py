"""Where time goes when GPU memory changes hands: ``python -m tests.bench.handover [GIB [HELD_GIB]]``, or ``busy``.

GIB of memory, in the ranges of an engine's KV pool (two for each of 36 layers), are taken by one process after another:
afresh, right after they were given back, after a pause, and after the SIGKILL of their owner. HELD_GIB are held by
somebody else all the time, as weights and a standby are, so that the memory that was given back is needed. Each line
says how long it took, how long of it memory was not free, and what each call of the driver took. ``busy``: in a process
with a thread that never waits, as an engine's event loop does not. Needs a GPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from weightcache.memory import cuda_backed
from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaError, CudaMemory

GIB = 1 << 30
RANGES = 72
SECONDS = 30.0
PIECES_MIB = (512, 64, 2048)
ROUNDS = 3


class Timed:
    """A driver that counts calls and time by name."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.bindings = driver.bindings
        self.spent: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._driver, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            except CudaError:
                self.spent.setdefault(name + " failed", []).append(time.perf_counter() - begin)
                begin = time.perf_counter()
                raise
            finally:
                self.spent.setdefault(name, []).append(time.perf_counter() - begin)

        return timed

    def said(self) -> str:
        """Number, sum and most of each call that took a millisecond in all, in milliseconds."""
        rows = sorted(self.spent.items(), key=lambda row: -sum(row[1]))
        shown = [
            f"{name} {len(took)}x {sum(took) * 1e3:.1f} (most {max(took) * 1e3:.1f})"
            for name, took in rows
            if sum(took) > 1e-3
        ]
        self.spent = {}
        return ", ".join(shown)


class Pool:
    """An engine's KV memory, as far as the driver sees it."""

    def __init__(self, total: int) -> None:
        memory = CudaMemory(0)
        self.driver = Timed(memory.driver)
        memory.driver = self.driver  # type: ignore[assignment]
        self.size = total // RANGES // memory.granularity * memory.granularity
        self.backed = CudaBacked(memory, [self.size] * RANGES)
        self.driver.said()

    def take(self, how: str) -> None:
        begin = time.monotonic()
        waited = self.backed.back([self.size] * RANGES, begin + SECONDS)
        self._say(f"take {how}", begin, f", of which {waited * 1e3:.0f} until it was free")

    def give_back(self) -> None:
        begin = time.monotonic()
        self.backed.give_back([0] * RANGES)
        self._say("give back", begin, "")

    def _say(self, what: str, begin: float, more: str) -> None:
        took = (time.monotonic() - begin) * 1e3
        print(f"  {what}: {took:.0f} ms{more}: {self.driver.said()}", flush=True)


def hold(total: int) -> None:
    """Hold memory until somebody ends this process."""
    pool = Pool(total)
    pool.take("of a process that is going to be killed")
    print("held", flush=True)
    signal.pause()


def holder(total: int) -> subprocess.Popen[str]:
    """A process that holds memory."""
    argv = [sys.executable, "-m", "tests.bench.handover", "hold", str(total), str(cuda_backed.PIECE)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line == "held\n":
            break
        print(line, end="", flush=True)
    return child


def end(child: subprocess.Popen[str]) -> None:
    """SIGKILL it and wait until it is gone."""
    pidfd = os.pidfd_open(child.pid)
    begin = time.perf_counter()
    child.kill()
    select.select([pidfd], [], [], SECONDS)
    print(f"  SIGKILL to gone: {(time.perf_counter() - begin) * 1e3:.0f} ms", flush=True)
    os.close(pidfd)
    child.wait()


@contextlib.contextmanager
def event_loop() -> Iterator[None]:
    """A thread that never waits."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            sum(range(50))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def busy(total: int) -> None:
    """The same memory again and again."""
    pool = Pool(total)
    for piece in (512 << 20, 2 << 30):
        cuda_backed.PIECE = piece
        for _ in range(ROUNDS):
            print(f"pieces of {piece >> 20} MiB")
            pool.take("alone")
            pool.give_back()
            with event_loop():
                for interval in (5e-5, 5e-3):
                    sys.setswitchinterval(interval)
                    pool.take(f"beside a busy thread, switch interval {interval * 1e3:g} ms")
                    pool.give_back()


def main() -> None:
    """Everything, or what a process of its own does."""
    if sys.argv[1:2] == ["hold"]:
        cuda_backed.PIECE = int(sys.argv[3])
        hold(int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["busy"]:
        busy(74 * GIB)
        return
    total, held = (int(word) * GIB for word in (*sys.argv[1:3], "74", "40")[:2])
    begin = time.monotonic()
    pool = Pool(total)
    pool.take("on a machine as it is")
    pool.give_back()
    other = holder(held)
    for piece in PIECES_MIB:
        cuda_backed.PIECE = piece << 20
        print(f"pieces of {piece} MiB, {held >> 30} GiB held by another process ({time.monotonic() - begin:.0f} s)")
        for pause in (0.0, 0.2, 2.0):
            time.sleep(pause)
            pool.take(f"{pause} s after it was given back")
            pool.give_back()
        for _ in range(ROUNDS):
            child = holder(total)
            end(child)
            pool.take("after its owner was killed")
            pool.give_back()
    end(other)


if __name__ == "__main__":
    main()
