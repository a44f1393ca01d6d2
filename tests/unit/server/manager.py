"""The service manager's end of $NOTIFY_SOCKET (sd_notify(3)) with a descriptor store, in a thread: fast, slow, deaf or
forgetful, as a test wants it.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from tests.unit.server.harness import eventually


class FakeManager:
    """One manager. ``address`` is a path, or an abstract name that begins with @.

    ``limit`` is how many descriptors it keeps (it refuses in silence, as systemd does); ``delay`` is how long it takes
    for each message; ``hook`` is called with each message before it is answered, while its descriptors are open.
    """

    def __init__(self, address: str, limit: int = 1000) -> None:
        self.address = address
        self.limit = limit
        self.delay = 0.0
        self.hook: Callable[[str], None] = lambda _: None
        self.messages: list[str] = []
        self.stored: list[tuple[str, int]] = []
        self._reading = threading.Event()
        self._reading.set()
        self._lock = threading.RLock()
        self.open()

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind, and read from now on."""
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(name)
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """Close the socket, as before a re-execution: nothing that was sent is lost, and what is stored stays."""
        os.close(self._ending)
        self._reading.set()
        self._thread.join(10)
        os.close(self._end)
        self._sock.shutdown(socket.SHUT_RD)
        while self._receive():
            pass
        self._sock.close()
        if not self.address.startswith("@"):
            Path(self.address).unlink()

    def close(self) -> None:
        """End everything."""
        self.hang_up()
        self.empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Read what is there already, and then nothing meanwhile."""
        while select.select([self._sock], [], [], 0)[0]:
            time.sleep(0.001)
        self._reading.clear()
        try:
            yield
        finally:
            self._reading.set()

    # -- the store -----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of what is stored, without the canaries'."""
        with self._lock:
            return sorted(name for name, _ in self.stored if not name.startswith("canary."))

    @property
    def canaries(self) -> list[str]:
        with self._lock:
            return sorted(name for name, _ in self.stored if name.startswith("canary."))

    def empty(self) -> None:
        """Drop everything, as a daemon-reload with a smaller limit does."""
        with self._lock:
            while self.stored:
                os.close(self.stored.pop()[1])

    def sent(self, start: str) -> list[str]:
        """The messages that begin with ``start``."""
        with self._lock:
            return [text for text in self.messages if text.startswith(start)]

    def await_sent(self, start: str, count: int = 1) -> list[str]:
        """Wait until there are that many."""
        eventually(lambda: len(self.sent(start)) >= count, what=f"no {start!r}: {self.messages[-10:]}")
        return self.sent(start)

    @property
    def status(self) -> str:
        """The last STATUS, or an empty text."""
        return next((text.removeprefix("STATUS=") for text in reversed(self.sent("STATUS="))), "")

    # ------------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            if self._end in select.select([self._sock, self._end], [], [])[0]:
                return
            if not self._reading.is_set():
                self._reading.wait()
                continue
            if self.delay:
                time.sleep(self.delay)
            self._receive()

    def _receive(self) -> bool:
        data, ancillary, flags, _ = self._sock.recvmsg(4096, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        fds = array.array("i")
        for level, kind, content in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            fds.frombytes(content)
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        text = data.decode()
        with self._lock:
            self.messages.append(text)
            self.hook(text)
            self._answer(dict(line.split("=", 1) for line in text.split("\n")), fds)
        return True

    def _answer(self, fields: dict[str, str], fds: Sequence[int]) -> None:
        name = fields.get("FDNAME", "")
        if fields.get("FDSTOREREMOVE") == "1":
            for entry in [entry for entry in self.stored if entry[0] == name]:
                self.stored.remove(entry)
                os.close(entry[1])
        for fd in fds:
            keep = fields.get("FDSTORE") == "1" and len(self.stored) < self.limit
            if keep and not any(kept == name and _same(fd, other) for kept, other in self.stored):
                self.stored.append((name, fd))
            else:
                os.close(fd)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _same(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
