"""Several tasks at the same time, all within one deadline."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def parallel(tasks: Sequence[Callable[[], T]], timeout: float) -> list[T | BaseException]:
    """The result, or the exception, of every task; TimeoutError for one that is not done after ``timeout`` seconds.

    Daemon threads, so that an interrupt ends the process without waiting for a silent peer.
    """
    results: list[T | BaseException] = [TimeoutError() for _ in tasks]

    def work(index: int) -> None:
        # A signal that one of these threads may take would be lost to the supervisor, which blocks and reads them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            results[index] = tasks[index]()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)
