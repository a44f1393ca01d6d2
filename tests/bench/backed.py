"""How long GPU memory behind addresses that stay takes to come and go: ``python -m tests.bench.backed [GIB]``.

What an engine's KV memory is made of (weightcache.memory.cuda_backed), in pieces of several sizes; and how long after
the SIGKILL of a process that holds it the memory is free. Needs a GPU.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from statistics import median

from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaMemory

GIB = 1 << 30
PIECES_MIB = (64, 512, 1024, 4096)
ROUNDS = 3
FREE_SECONDS = 30.0


def took(run: object, *args: object) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    run(*args)  # type: ignore[operator]
    return (time.perf_counter() - begin) * 1e3


def comes_and_goes(memory: CudaMemory, total: int, piece: int) -> None:
    """Take and give back ``total`` bytes in ranges of ``piece`` bytes."""
    sizes = [piece] * (total // piece)
    begin = time.perf_counter()
    backed = CudaBacked(memory, sizes)
    reserved = (time.perf_counter() - begin) * 1e3
    nothing = [0] * len(sizes)
    rows = [(took(backed.back, sizes), took(backed.give_back, nothing)) for _ in range(ROUNDS)]
    taken, given = (median(column) for column in zip(*rows, strict=True))
    backed.close()
    print(
        f"{total >> 30} GiB in pieces of {piece >> 20} MiB: reserve {reserved:.1f} ms, take {taken:.1f} ms, "
        f"give back {given:.1f} ms (medians of {ROUNDS})",
        flush=True,
    )


def hold(total: int) -> None:
    """Hold ``total`` bytes until somebody ends this process."""
    backed = CudaBacked(CudaMemory(0), [GIB] * (total // GIB))
    backed.back([GIB] * (total // GIB))
    print("held", flush=True)
    signal.pause()


def killed(memory: CudaMemory, total: int) -> None:
    """SIGKILL a process that holds ``total`` bytes."""
    before = memory.free_bytes()
    argv = [sys.executable, "-m", "tests.bench.backed", "hold", str(total)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    pidfd = os.pidfd_open(child.pid)
    begin = time.perf_counter()
    child.kill()
    select.select([pidfd], [], [], FREE_SECONDS)
    gone = (time.perf_counter() - begin) * 1e3
    while memory.free_bytes() < before - GIB // 4 and time.perf_counter() - begin < FREE_SECONDS:
        time.sleep(0.001)
    free = (time.perf_counter() - begin) * 1e3
    os.close(pidfd)
    child.wait()
    print(
        f"SIGKILL of a process that holds {total >> 30} GiB: gone after {gone:.1f} ms, memory free after {free:.1f} ms"
    )


def main() -> None:
    """Everything, or what a process of its own does."""
    if sys.argv[1:2] == ["hold"]:
        hold(int(sys.argv[2]))
        return
    total = int((sys.argv[1:] or ["60"])[0]) * GIB
    memory = CudaMemory(0)
    for piece in PIECES_MIB:
        comes_and_goes(memory, total, piece << 20)
    for size in (total, total, total // 6):
        killed(memory, size // GIB * GIB)


if __name__ == "__main__":
    main()
