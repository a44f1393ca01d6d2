"""What the loaders of several nodes say to each other over TCP: small JSON records with their length before them.

Anybody may connect, so nothing here trusts a peer: lengths are limited, records are decoded strictly, and every call
ends within seconds.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass

from weightcache import records
from weightcache.errors import ProtocolError
from weightcache.loader.facts import Facts

PROTOCOL = 1
MAX_MESSAGE = 64 * 1024
SEND_SECONDS = 5.0
LOST_SECONDS = 25
"""After so long without a sign of the other host, it is taken for dead."""

_LENGTH = struct.Struct("!I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a node is: its number, the hosts of all nodes, its ranks, the name it has for this launch, its facts."""

    node: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    group: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Welcome:
    """All nodes are there: load, as ``group``."""

    group: str


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no weights. To node 0 its reason alone, from node 0 a sentence that names the node."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """This node has published; what becomes of its connection does not matter any more."""


@dataclass(frozen=True, slots=True)
class Look:
    """A host that loads nothing now asks whether a load waits for it. Answer: Waiting, and the end."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A load waits for others here; ``together``: for those who ask, because all have the same nodes."""

    together: bool


Message = Hello | Welcome | Failed | Finished | Look | Waiting
_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in (Hello, Welcome, Failed, Finished, Look, Waiting)}


class Wire:
    """One connection. ``receive`` raises ConnectionError at its end and ProtocolError for what is no message."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self._buffer = b""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError when the peer does not take it within SEND_SECONDS."""
        body = json.dumps({"protocol": PROTOCOL, "type": type(message).__name__, **records.to_plain(message)}).encode()
        if len(body) > MAX_MESSAGE:
            raise ProtocolError(f"a message of {len(body)} bytes to {self.address}, {MAX_MESSAGE} are allowed")
        self.sock.settimeout(SEND_SECONDS)
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """The messages that have arrived whole, after waiting for at most ``seconds`` for more bytes."""
        self.sock.settimeout(max(seconds, 0.0))
        try:
            data = self.sock.recv(MAX_MESSAGE)
        except (BlockingIOError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and error.errno:  # the kernel's: the peer is gone
                raise ConnectionError(str(error)) from None
            return []
        except OSError as error:
            raise ConnectionError(error.strerror or str(error)) from None
        if not data:
            raise ConnectionError("the connection was closed")
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_MESSAGE:
                raise ProtocolError(f"a message of {size} bytes from {self.address}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(decode(self._buffer[_LENGTH.size : end]))
            self._buffer = self._buffer[end:]
        return messages

    def close(self) -> None:
        """End the connection."""
        self.sock.close()


def decode(data: bytes) -> Message:
    """One message. Raises ProtocolError for anything else."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or body.pop("protocol", None) != PROTOCOL:
            raise ProtocolError(f"no message of the loaders' protocol {PROTOCOL}")
        cls = _TYPES.get(str(body.pop("type", "")))
        if cls is None:
            raise ProtocolError("a message of an unknown type")
        return records.from_plain(cls, body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed message: {error}") from None
