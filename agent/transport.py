"""One packet with its file descriptors: the only place that calls sendmsg and recvmsg.

Unix SOCK_SEQPACKET (unix(7)): a packet and its descriptors arrive whole or not at all. The rules kept here:
received descriptors are close-on-exec from the start, a truncated packet or a truncated descriptor list
(also from too few free descriptors, see recvmsg(2) MSG_CTRUNC) is an error and everything that came is closed,
and a receiver that expects no descriptors gives the kernel no room for them, so that none can be pushed at it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcache.errors import AgentUnavailable, PermissionRefused, ProtocolError

MAX_PACKET = 160 * 1024
"""Largest body in bytes; below the kernel's default send buffer of 212,992 bytes."""

MAX_FDS = 253
"""The kernel's limit of descriptors in one packet (SCM_MAX_FD)."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One received packet. The receiver owns ``fds`` and must close them. Empty ``data`` means end of file."""

    data: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Close every descriptor that came with the packet."""
        close_all(self.fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, ignoring those already closed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def make_room(count: int = MAX_FDS) -> None:
    """Let the kernel enlarge this process's descriptor table now for ``count`` more descriptors. Never raises.

    Enlarging it while threads run waits for an RCU grace period (expand_fdtable in fs/file.c), several milliseconds
    that would otherwise fall on the first packet with many descriptors.
    """
    with contextlib.suppress(OSError, ValueError):
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(lowest, fcntl.F_DUPFD_CLOEXEC, lowest + count))
        finally:
            os.close(lowest)


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet; ``fds`` stay the caller's. Raises OSError (BlockingIOError when the socket is full)."""
    if not data or len(data) > MAX_PACKET or len(fds) > MAX_FDS:
        raise ProtocolError(f"cannot send a packet of {len(data)} bytes with {len(fds)} descriptors")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket, max_fds: int = 0) -> Packet:
    """Receive one packet with at most ``max_fds`` descriptors. Raises ProtocolError on any truncation, and OSError."""
    room = socket.CMSG_SPACE(max_fds * array.array("i").itemsize) if max_fds else 0
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    packet = Packet(data, tuple(fds))
    if max_fds and flags & socket.MSG_CTRUNC:
        packet.close()
        raise ProtocolError("descriptors were lost on the way (too many, or this process has too few free descriptors)")
    if flags & socket.MSG_TRUNC or len(data) > MAX_PACKET:
        packet.close()
        raise ProtocolError(f"a packet larger than {MAX_PACKET} bytes")
    # CMSG_SPACE rounds up, so the kernel may deliver one more than asked for; an empty packet can carry some too.
    if len(fds) > max_fds or (fds and not data):
        packet.close()
        raise ProtocolError("descriptors came where none were expected")
    return packet


def connect(path: Path | str, deadline: float) -> socket.socket:
    """Connect a blocking SOCK_SEQPACKET socket before ``deadline`` (time.monotonic()).

    A full backlog makes connect() fail with EAGAIN, which is retried until the deadline (asyncio's sock_connect
    would report success there). Raises AgentUnavailable, or PermissionRefused where the socket's mode forbids it.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:  # no descriptor is left
        raise AgentUnavailable(f"cannot connect to {path} ({os.strerror(error.errno or errno.EIO)})") from None
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AgentUnavailable(f"the agent at {path} accepts no connection in time")
            # connect() on a Unix socket waits for backlog room for SO_SNDTIMEO; settimeout() would not wait at all.
            # Zero would mean for ever.
            seconds, micros = divmod(max(int(left * 1e6), 1000), 1_000_000)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:
                time.sleep(min(0.02, left))
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
            return sock
    except PermissionError:
        sock.close()
        raise PermissionRefused(
            f"this user may not connect to {path} (is it in the group that owns the socket?)"
        ) from None
    except OSError as error:
        sock.close()
        raise AgentUnavailable(f"no agent listens at {path} ({os.strerror(error.errno or errno.EIO)})") from None
    except BaseException:
        sock.close()
        raise


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end when it connected (SO_PEERCRED, unix(7))."""
    pid, uid, gid = struct.unpack("iii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


class AsyncChannel:
    """Packets over one SOCK_SEQPACKET connection inside asyncio, which itself knows only byte streams.

    The channel owns the socket. One task reads, one task writes at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive(self, max_fds: int = 0) -> Packet:
        """Wait for the next packet (bound the wait with asyncio.timeout); an empty one means end of file."""
        while True:
            try:
                return receive_packet(self.sock, max_fds)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ConnectionError:
                return Packet(b"")

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet, waiting while the peer's queue is full (bound the wait with asyncio.timeout)."""
        while True:
            try:
                send_packet(self.sock, data, fds)
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                # Too many unread descriptors of this user are in flight (unix(7)): wait for peers to read theirs.
                await asyncio.sleep(0.05)
            else:
                return

    async def _ready(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        fd = self.sock.fileno()
        add(fd, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            remove(fd)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()
