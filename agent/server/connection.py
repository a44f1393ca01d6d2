"""One accepted connection: typed messages with deadlines over one channel."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
from typing import TYPE_CHECKING

from weightcache import protocol, transport
from weightcache.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.server.peers import Peer

REQUEST_SECONDS = 10.0
"""How long a client may take to say what it wants."""

SEND_SECONDS = 10.0
"""How long a client may leave an answer unread when its queue is full."""


class Door(enum.Enum):
    """The three sockets of a rank."""

    PUBLIC = "public"
    STATUS = "status"
    PUBLISH = "publish"


class PeerLeft(Exception):
    """The connection is over: closed, reset, or the peer does not read or write in time."""


class Connection:
    """One connection. ``door`` is the socket that it came through; the connection owns its socket."""

    def __init__(self, sock: socket.socket, peer: Peer, door: Door) -> None:
        self.channel = transport.AsyncChannel(sock)
        self.peer = peer
        self.door = door

    async def receive(
        self, seconds: float | None = REQUEST_SECONDS, max_fds: int = 0
    ) -> tuple[protocol.Message, tuple[int, ...]]:
        """The next message; the caller owns its descriptors. Raises PeerLeft, ProtocolError or VersionSkew."""
        try:
            async with asyncio.timeout(seconds):
                packet = await self.channel.receive(max_fds)
        except TimeoutError:
            raise ProtocolError(f"no request within {seconds:g} s") from None
        except OSError as error:
            raise PeerLeft(str(error)) from None
        if not packet.data:
            raise PeerLeft("closed")
        try:
            return protocol.decode(packet.data, len(packet.fds)), packet.fds
        except BaseException:
            packet.close()
            raise

    async def send(self, message: protocol.Message, fds: Sequence[int] = (), seconds: float = SEND_SECONDS) -> None:
        """Send one message; the descriptors stay the caller's. Raises PeerLeft."""
        data = protocol.encode(message, len(fds))
        try:
            async with asyncio.timeout(seconds):
                await self.channel.send(data, fds)
        except OSError as error:  # TimeoutError is one too
            raise PeerLeft(str(error) or "the answer was not read in time") from None

    def send_now(self, message: protocol.Message) -> None:
        """Send if there is room, for peers that are being turned away."""
        with contextlib.suppress(OSError):
            transport.send_packet(self.channel.sock, protocol.encode(message))

    def end_answers(self) -> None:
        """Say no more: the peer reads what was sent, and then the end. What it sends can still be received."""
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_WR)

    async def closed(self) -> None:
        """Wait for the end of a connection on which nothing more may be said."""
        with contextlib.suppress(PeerLeft, ProtocolError):
            await self.receive(seconds=None)

    def hang_up(self) -> None:
        """End the conversation from outside: whoever waits on this connection sees its end."""
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.channel.close()
