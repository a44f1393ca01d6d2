"""The listening sockets: bound with their final mode before anybody can connect, or handed in by the manager."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import stat
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

log = logging.getLogger("weightcache")

FIRST_FD = 3
_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_ACL_NOBODY = 0xFFFFFFFF
BACKLOG = 512


@dataclass(slots=True)
class Listener:
    """A listening socket; ``identity`` is set when it was bound here and is to be unlinked again."""

    sock: socket.socket
    path: Path
    identity: tuple[int, int] | None = None

    def close(self) -> None:
        """Close it; unlink it if it is still the one that was bound here."""
        self.sock.close()
        try:
            if self.identity and _identity(self.path) == self.identity:
                self.path.unlink()
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.warning("cannot remove %s: %s", self.path, error.strerror)


@dataclass(frozen=True, slots=True)
class Handed:
    """What the service manager passed: at most one public socket, and everything else by name."""

    public: socket.socket | None = None
    others: tuple[tuple[str, int], ...] = field(default=())


NOTHING = Handed()


def pending(listener: socket.socket) -> bool:
    """Whether somebody waits to be accepted."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def handed_in(environment: MutableMapping[str, str]) -> Handed:
    """Take over $LISTEN_FDS (sd_listen_fds(3)): no child may inherit the descriptors or the variables."""
    pid, count, names = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    environment.pop("LISTEN_PIDFDID", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return Handed()
    fds = range(FIRST_FD, FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    labels = names.split(":") + [""] * len(fds)
    public, others = None, []
    for fd, name in zip(fds, labels, strict=False):
        if public is None and _is_listener(fd):
            public = socket.socket(fileno=fd)
        else:
            others.append((name, fd))
    return Handed(public, tuple(others))


def _is_listener(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    probe = socket.socket(fileno=os.dup(fd))
    with probe:
        kind = (probe.family, probe.type)
        return kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET) and bool(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )


def bind(path: Path, mode: int, gid: int | None = None) -> Listener:
    """Bind and listen at ``path``. A socket file that nobody answers on is replaced. Raises WeightcacheError."""
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # The file gets its mode with its name: a chmod of the name could hit what somebody has put there since.
        os.fchmod(sock.fileno(), mode)
        mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
        if gid is not None:
            _give(path, gid)
        # Only now can anybody connect.
        sock.listen(BACKLOG)
        return Listener(sock, path, _identity(path))
    except OSError as error:
        sock.close()
        raise WeightcacheError(f"cannot listen at {path}: {error.strerror or error}") from None


def _give(path: Path, gid: int) -> None:
    try:
        os.chown(path, -1, gid, follow_symlinks=False)
    except OSError as error:  # fewer may connect than was meant, which is no reason to serve nobody
        log.warning("cannot give %s to group %d: %s", path, gid, error.strerror)


def let_in(path: Path, uid: int) -> None:
    """Let one user more connect to ``path``."""
    try:
        allow(path, uid, os.R_OK | os.W_OK)
    except OSError as error:  # a file system without such entries
        log.warning("cannot let uid %d connect to %s: %s", uid, path, error.strerror)


def allow(file: Path | int, uid: int, rights: int) -> None:
    """Give one user more ``rights`` (R_OK, W_OK) to ``file``: an entry beside its owner and its group (acl(5)).

    The file's mode has to be final. Raises OSError, also where the file system has no such entries.
    """
    named = not isinstance(file, int)
    mode = stat.S_IMODE(os.stat(file, follow_symlinks=not named).st_mode)
    owner, group, others = mode >> 6, mode >> 3 & 7, mode & 7
    # From linux/posix_acl_xattr.h: tag (owner, a user, group, the most that the two have, others), rights, id.
    entries = ((1, owner, None), (2, rights, uid), (4, group, None), (16, group | rights, None), (32, others, None))
    packed = (struct.pack("<HHI", tag, given, _ACL_NOBODY if of is None else of) for tag, given, of in entries)
    os.setxattr(file, _ACL, struct.pack("<I", _ACL_VERSION) + b"".join(packed), follow_symlinks=not named)


def _clear(path: Path) -> None:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with probe:
            result = probe.connect_ex(str(path))
    except OSError as error:
        raise WeightcacheError(f"cannot listen at {path}: {error}") from None
    if result == errno.ENOENT:
        return
    if (
        result != errno.ECONNREFUSED or not path.is_socket()
    ):  # an answer, or a backlog so full (EAGAIN) that somebody must be there
        raise WeightcacheError(f"another agent answers at {path} ({os.strerror(result)})")
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int]:
    result = path.lstat()
    return result.st_dev, result.st_ino
