"""Who is at the other end of a connection: credentials from the kernel, the rest from /proc for display only."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from weightcache import commands, transport

# From asm-generic/socket.h, Linux 6.5; Python 3.11 has no name for it.
_SO_PEERPIDFD = 77
_COMMAND_LENGTH = 200
_NO_SUCH_OPTION = (errno.ENOPROTOOPT, errno.EOPNOTSUPP)
# ENODATA: there never was one that could be named. EINVAL is what most kernels say of a process that was reaped.
_GONE = (errno.ESRCH, errno.ENODATA, errno.EINVAL)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. ``pid`` is 0 when it lives in a process namespace that this one cannot see."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"pid {self.pid} (uid {self.uid})"


def identify(sock: socket.socket) -> Peer:
    """The peer as it was when it connected."""
    return Peer(*transport.peer_credentials(sock))


def open_pidfd(sock: socket.socket, peer: Peer) -> int | None:
    """A pidfd of the peer (the caller's), or None where it cannot be had.

    Raises ProcessLookupError if the peer is gone, and any other OSError where that is not known yet: no descriptor is
    left for instance.
    """
    if peer.pid <= 0:
        return None
    try:
        fd: int = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]
    except OSError as error:
        if error.errno in _GONE:
            raise ProcessLookupError(errno.ESRCH, "the peer is gone") from None
        if error.errno not in _NO_SUCH_OPTION:
            raise
    else:
        os.set_inheritable(fd, False)
        return fd
    return _open_by_number(sock, peer.pid)


def _open_by_number(sock: socket.socket, pid: int) -> int | None:
    # Before Linux 6.5 the number may have been reused by now; a connection that is still open says that it was not.
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, *_NO_ROOM):
            raise
        return None
    if _at_end(sock):
        os.close(fd)
        raise ProcessLookupError(errno.ESRCH, "the peer is gone")
    return fd


def _at_end(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def command_of(pid: int) -> str:
    """The command line of ``pid`` as one harmless line of at most 200 characters, without secrets."""
    # A title that was written over the arguments leaves the rest of them empty.
    words = _read(pid, "cmdline").rstrip(b"\0").decode("utf-8", "replace").split("\0")
    text = commands.shown(words) if words != [""] else ""
    return "".join(char if char.isprintable() else "?" for char in text[:_COMMAND_LENGTH])


def unit_of(pid: int) -> str:
    """The systemd unit that ``pid`` runs in, or an empty text."""
    return unit_in(_read(pid, "cgroup").decode("utf-8", "replace"))


def unit_in(cgroups: str) -> str:
    """The innermost service or scope in the text of a /proc/PID/cgroup file (cgroups(7))."""
    for line in cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd"):
            for part in reversed(path.split("/")):
                if part.endswith((".service", ".scope")) and part.isprintable():
                    return part[:_COMMAND_LENGTH]
    return ""


def _read(pid: int, name: str) -> bytes:
    if pid <= 0:
        return b""
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(8192)
    except OSError:
        return b""
