"""The processes of a launch's ranks: tied to the one that started them, watched, and heard when they fail."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from weightcache.errors import LoadFailed
from weightcache.loader import reasons
from weightcache.loader.reasons import Reason

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.2


def end_with_parent() -> None:
    """In a new process: be killed when its parent ends. SGLang does the same, after ten seconds of imports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)


def run(run_scheduler: Callable[..., Any], *arguments: Any, **keywords: Any) -> NoReturn:
    """One rank: SGLang's scheduler, which the plugin ends with status 0 once its weights are published.

    SGLang logs an exception and lets the process end with 0, too: whatever comes back here has failed.
    """
    from sglang.srt.managers import scheduler

    described = scheduler.get_exception_traceback

    def describe() -> str:
        if (error := sys.exc_info()[1]) is not None:
            reasons.leave(reasons.of(error))
        return str(described())

    scheduler.get_exception_traceback = describe
    try:
        run_scheduler(*arguments, **keywords)
    except Exception as error:  # SGLang's own start, before it catches anything
        reasons.leave(reasons.of(error))
        raise
    raise SystemExit(LoadFailed.exit_status)


class Processes:
    """Stands in for ``multiprocessing`` where SGLang starts the ranks: it knows them, and starts no more than needed.

    Each import of SGLang takes about ten seconds. A data-parallel controller runs in this process, so that the ranks
    that it starts are this process's children like all others. With ``alone`` the only rank runs in ``join``.
    """

    def __init__(self, real: Any, controller: Callable[..., Any], ranks: Sequence[int], *, alone: bool) -> None:
        self._real = real
        self._controller = controller
        self._ranks = ranks
        self._alone = alone
        self._made: list[BaseProcess] = []
        self._here: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Process(  # noqa: N802  the name is multiprocessing's
        self, target: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, **others: Any
    ) -> Any:
        """Make a process, or what looks like one."""
        call = functools.partial(target, *args, **(kwargs or {}))
        if target is self._controller:
            return _Here(call)
        if self._alone:
            return _Here(lambda: self._here.append(call))
        process = self._real.Process(target=target, args=tuple(args), kwargs=dict(kwargs or {}), **others)
        self._made.append(process)
        if len(self._made) == 1:  # the controller waits for its ranks itself, and for one after the other
            threading.Thread(target=self._watch, name="weightcache-ranks", daemon=True).start()
        return process

    def join(self) -> None:
        """Wait until all ranks have published. One that fails ends this process at once, and with it all others."""
        for run_here in self._here:
            run_here()
        if not self._made:
            raise LoadFailed("SGLang launched no scheduler for these arguments")
        for process in self._made:
            process.join()
        self._check()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self._check()

    def _check(self) -> None:
        for index, process in enumerate(list(self._made)):
            if status := process.exitcode:
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                rank = f"rank {self._ranks[index]}" if index < len(self._ranks) else "a rank"
                message = f"the process of {rank} ended with {how} before its weights were published"
                reasons.leave(Reason(LoadFailed.code, message, own=status < 0))
                # The others wait for it in a collective, and nothing but their end gives their memory back.
                os._exit(LoadFailed.exit_status)


class _Here:
    """A process that is none: ``start`` runs its target."""

    pid = 0
    exitcode = None

    def __init__(self, run: Callable[[], Any]) -> None:
        self.start = run

    def is_alive(self) -> bool:
        """It has run."""
        return False
