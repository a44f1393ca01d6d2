"""The HTTP port, held by the launcher so that it outlives the engine: handed in by systemd, or bound here.

While one engine is gone and the next is not there yet, new connections wait in the kernel's queue. The launcher never
accepts one: the engine asks for the socket when it begins to listen (weightcache.engine.listener).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import TYPE_CHECKING

from weightcache.errors import UsageError
from weightcache.sglang_options import DEFAULT_HOST, DEFAULT_PORT as DEFAULT_PORT, why_no_socket

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from weightcache.sglang_options import Given

FIRST_FD = 3
BACKLOG = 2048
"""As uvicorn's; the kernel allows as many as net.core.somaxconn says."""


def held(launch: Given, hold: bool, environment: MutableMapping[str, str]) -> socket.socket | None:
    """The port of this launch, if it is handed in or (``hold``) to be held. Raises UsageError."""
    port = launch.number("port", DEFAULT_PORT)
    found = handed_in(environment, port)
    if found is None and not hold:
        return None
    if why := why_no_socket(launch, environment):
        raise UsageError(f"the port cannot be held for this engine: {why}")
    return found or bound(launch.text("host"), DEFAULT_PORT if port is None else port)


def handed_in(environment: MutableMapping[str, str], port: int | None) -> socket.socket | None:
    """The socket of a socket unit (sd_listen_fds(3)), if there is one; the server sees neither it nor the variables.

    Raises UsageError if it is not one TCP socket that listens on ``port``.
    """
    pid, count, _ = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    environment.pop("LISTEN_PIDFDID", None)
    if pid != str(os.getpid()) or not count.isdigit() or not int(count):
        return None
    if int(count) != 1:
        raise UsageError(f"{count} sockets were handed in: an engine listens on one")
    os.set_inheritable(FIRST_FD, False)
    if not stat.S_ISSOCK(os.fstat(FIRST_FD).st_mode):
        raise UsageError("what was handed in is no socket")
    listener = socket.socket(fileno=FIRST_FD)
    if why := _unfit(listener, port):
        listener.close()
        raise UsageError(f"the socket that was handed in {why}")
    return listener


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens as the server would. Raises UsageError."""
    try:
        addresses = socket.getaddrinfo(host or DEFAULT_HOST, port, type=socket.SOCK_STREAM)
        if len({address for *_, address in addresses}) > 1:
            raise UsageError(f"{host} stands for several addresses: give the engine one of them as --host")
        family, *_, address = addresses[0]
        # Not SO_REUSEPORT: connections that wait in the queue of a socket that is closed are reset.
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno in errno.errorcode else str(error)
        raise UsageError(f"port {port} of {host or DEFAULT_HOST} cannot be held ({why})") from None


def _unfit(listener: socket.socket, port: int | None) -> str:
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
        return "is no TCP socket"
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "does not listen: Accept=no is what its unit needs"
    if (actual := listener.getsockname()[1]) != port:
        return f"listens on port {actual}: give the engine --port {actual} as well"
    return ""
