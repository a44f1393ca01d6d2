"""A Unix socket where the launcher listens itself: the socket and who came in, behind one descriptor to watch."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        """Readable when somebody came, or one of those in ``selector`` has something (epoll can be watched itself)."""
        return self.selector.fileno()

    def accept(self) -> socket.socket | None:
        """Whoever came; None if they have gone again."""
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return None
        sock.setblocking(False)
        return sock

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
