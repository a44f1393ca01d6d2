"""What a load that waits for other hosts says to those that look for one (lookout.py).

Node 0 says it where it listens for the others (gathering.py). Another node listens at the same port of its own host,
for node 0 alone, until they have met. Nothing that is said here makes anybody load: who looks decides for itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from types import TracebackType
from typing import Self

from weightcache.errors import ProtocolError
from weightcache.loader.wire import Hello, Look, Waiting, Wire

BACKLOG = 64
LOOK_SECONDS = 2.0
"""How long a connection may take to ask, and an answer to come."""
PAUSE_SECONDS = 0.1


def listen(host: str, port: int) -> socket.socket:
    """Listen at this host, by the name or address that other nodes know. Raises OSError."""
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if address != host and ipaddress.ip_address(address).is_loopback:
        address = ""  # a host's own name often means 127.0.1.1 to itself, where nobody else could come
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


class Beacon:
    """Answers at ``port`` of this node's host, in a thread. Where it cannot listen there, nobody finds this load."""

    def __init__(self, me: Hello, port: int) -> None:
        self._me = me
        self._listener: socket.socket | None = None
        self._over = threading.Event()
        with contextlib.suppress(OSError):
            self._listener = listen(me.nodes[me.node], port)
        self._thread = threading.Thread(target=self._serve, name="weightcache-beacon", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        if self._listener is None:
            return
        while not self._over.is_set():
            try:
                sock, address = self._listener.accept()
                with sock:
                    self._answer(Wire(sock, str(address[0])))
            except (OSError, ProtocolError):  # who left, and who talks of something else
                self._over.wait(PAUSE_SECONDS)

    def _answer(self, wire: Wire) -> None:
        match wire.receive(LOOK_SECONDS):
            case [Look(nodes)]:
                wire.send(Waiting(nodes == self._me.nodes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
            self._thread.join(LOOK_SECONDS + 1)
            self._listener.close()


def look(nodes: tuple[str, ...], node: int, port: int) -> Waiting | None:
    """Ask whether a load waits at a node's host; None: nobody says so."""
    try:
        with socket.create_connection((nodes[node], port), timeout=LOOK_SECONDS) as sock:
            wire = Wire(sock, nodes[node])
            wire.send(Look(nodes))
            match wire.receive(LOOK_SECONDS):
                case [Waiting() as waiting]:
                    return waiting
    except (OSError, ProtocolError):
        return None
    return None
