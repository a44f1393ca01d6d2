"""The least that can hold a set: takes one publication, keeps its descriptors, answers Inspect. No torch, no CUDA.

    python -m tests.bench.holder SOCKET        prints "listening", then serves until it is ended

It stands in for an agent where a test or a benchmark is about memory alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

from weightcache import protocol, transport
from weightcache.errors import WeightcacheError

MAX_FDS = 1 + 250


class Holder:
    """Listens at ``path`` and serves each connection in a thread of its own. ``fds``: manifest, then arenas."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.info: protocol.SetInfo | None = None
        self.fds: tuple[int, ...] = ()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)

    def start(self) -> Holder:
        """Serve in the background."""
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def serve(self) -> None:
        """Serve until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def hold(self, info: protocol.SetInfo, fds: tuple[int, ...]) -> None:
        """Keep these descriptors from now on, and forget the earlier ones."""
        old, self.info, self.fds = self.fds, info, fds
        transport.close_all(old)

    def close(self) -> None:
        """Stop listening and let the memory go."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        transport.close_all(self.fds)
        self.fds = ()

    def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                packet = transport.receive_packet(connection, MAX_FDS)
                if not packet.data:
                    return
                try:
                    answer, fds = self._answer(protocol.decode(packet.data, len(packet.fds)), packet.fds)
                except WeightcacheError as error:
                    packet.close()
                    answer, fds = protocol.failure(error), ()
                transport.send_packet(connection, protocol.encode(answer, len(fds)), fds)

    def _answer(self, message: protocol.Message, fds: tuple[int, ...]) -> tuple[protocol.Message, tuple[int, ...]]:
        match message:
            case protocol.Begin():
                return protocol.Accepted(), ()
            case protocol.Publish():
                self.hold(message.set, fds)
                return protocol.Published("held"), ()
            case protocol.Commit():
                return protocol.Committed(("held",)), ()
            case protocol.Inspect() if self.info is not None and message.set_id in (None, "held"):
                return protocol.Attached("held", self.info.role, "", self.info.arenas), self.fds
            case protocol.Inspect():
                return protocol.Failure("empty", "nothing is held"), ()
        return protocol.Failure("protocol", f"the holder does not understand {type(message).__name__}"), ()


def main() -> None:
    """Serve at the path on the command line."""
    holder = Holder(sys.argv[1])
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        holder.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
