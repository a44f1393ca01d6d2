"""A Unix socket where the launcher listens itself: the socket and who came in, behind one descriptor to watch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import time
from typing import TYPE_CHECKING

from weightcache.launch.console import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAUSE_SECONDS = 1.0
"""In which nobody is let in, when this process has no descriptor or no memory for them."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """Listens at ``path`` for packets, and removes it when it is closed; what a launcher left there that died goes.

    Nothing here blocks. Whoever comes in is registered with ``selector`` by who lets them in, and closed there.
    ``mode`` is the file's from the start; None: the directory says who may come. Raises OSError.
    """

    def __init__(self, path: Path, backlog: int = 128, mode: int | None = None) -> None:
        path.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            self.selector = stack.enter_context(selectors.EpollSelector())
            kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self.listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            with _mode(mode):
                self.listener.bind(os.fspath(path))
            stack.callback(path.unlink, missing_ok=True)
            self.listener.listen(backlog)
            self.selector.register(self.listener, selectors.EVENT_READ)
            self._path = path
            self._paused_until = math.inf
            self._complained = False
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        """Readable when somebody came, or one of those in ``selector`` has something (epoll can be watched itself)."""
        return self.selector.fileno()

    def ready(self) -> list[selectors.SelectorKey]:
        """Of whom in ``selector`` something can be read now; ``listener`` is among them when somebody came."""
        if time.monotonic() >= self._paused_until:
            self._paused_until = math.inf
            self.selector.register(self.listener, selectors.EVENT_READ)
        return [key for key, _ in self.selector.select(0)]

    def due(self) -> float:
        """When to ask ``ready`` although nothing is readable, on CLOCK_MONOTONIC."""
        return self._paused_until

    def accept(self) -> socket.socket | None:
        """Whoever came; None if they have gone again, or cannot be let in for now, which is said once."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._pause(error)
            return None
        self._complained = False
        sock.setblocking(False)
        return sock

    def _pause(self, error: OSError) -> None:
        # The socket stays readable: who went on watching it would go round without an end, and starve everybody else.
        self.selector.unregister(self.listener)
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        if not self._complained:
            say(f"nobody can be let in at {self._path} ({error.strerror}): trying again every {PAUSE_SECONDS:.0f} s")
        self._complained = True

    def close(self) -> None:
        """Remove the socket."""
        self._stack.close()


@contextlib.contextmanager
def _mode(mode: int | None) -> Iterator[None]:
    """What is made inside gets it."""
    if mode is None:
        yield
        return
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
