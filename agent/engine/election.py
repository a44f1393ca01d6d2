"""Who of an engine's slots accepts requests: who has byte 0 of its lock file, which one thread waits for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from weightcache.errors import WeightcacheError
from weightcache.standby.locks import ByteLock

BYTE = 0


class Election:
    """Byte 0 of the file at ``lock``. What waits in the kernel cannot be called back: a lock that nobody wants any more
    when it comes is given back at once, and who wants it again by then goes on with the same wait.
    """

    def __init__(self, lock: Path) -> None:
        self._lock = ByteLock(lock, BYTE)
        # A forked child shares the lock, which would outlive this process with it.
        os.register_at_fork(after_in_child=self._lock.close)
        self._changed = threading.Condition()
        self._candidate: object = None
        """Of the call of win() that waits."""
        self._waits = False
        self._problem: OSError | None = None
        self.won = False

    def win(self) -> None:
        """Wait for the lock, however long that takes. Raises OSError, and WeightcacheError if it is given up."""
        with self._changed:
            if self.won:
                return
            if self._candidate is not None:
                raise WeightcacheError("this engine waits to be elected already")
            candidate = self._candidate = object()
            if not self._waits:
                self._waits, self._problem = True, None
                threading.Thread(target=self._wait, name="weightcache-election", daemon=True).start()
            self._changed.wait_for(lambda: self._candidate is not candidate or self.won or self._problem)
            if self._candidate is not candidate:
                raise WeightcacheError("the lock was given up before this engine had it")
            self._candidate = None
            if self._problem is not None:
                raise self._problem

    def give_up(self) -> None:
        """Give the lock back, or want it no more."""
        with self._changed:
            self._candidate = None
            if self.won:
                self.won = False
                self._lock.give_back()
            self._changed.notify_all()

    def _wait(self) -> None:
        problem = None
        try:
            self._lock.take()
        except OSError as error:
            problem = error
        with self._changed:
            self._waits, self._problem = False, problem
            if problem is None and self._candidate is not None:
                self.won = True
            else:
                self._lock.give_back()
            self._changed.notify_all()
