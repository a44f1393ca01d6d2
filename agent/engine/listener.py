"""The HTTP port is held by the launcher (or by the service manager), and given to the engine when it begins to listen.

So the port outlives the engine: while one is gone and the next is not there yet, new connections wait in the kernel's
queue instead of being refused. Requests that the dead engine had accepted fail.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from weightcache import transport
from weightcache.engine import adapter_server as sglang
from weightcache.engine.directive import Directive, ListenerWanted, encode_report
from weightcache.errors import ProtocolError

ANSWER_SECONDS = 10.0

listening = threading.Event()
"""Set when the engine's own server accepts connections on the socket that it was given."""


def hook(directive: Directive) -> Callable[..., Awaitable[None]]:
    """Around uvicorn's ``Server.startup``; other servers (a sidecar, a metrics page) bind their own."""

    async def around(original: Callable[..., Awaitable[None]], server: Any, sockets: Any = None) -> None:
        if sockets is not None or not sglang.is_engines(server):
            await original(server, sockets)
            return
        listener = given(directive)  # closed by the event loop's server
        await original(server, [listener])
        sglang.say_started(server, listener)
        listening.set()

    return around


def given(directive: Directive) -> socket.socket:
    """Ask the launcher for the listening socket. Raises WeightcacheError or OSError."""
    sock = transport.connect(directive.report, time.monotonic() + ANSWER_SECONDS)
    with contextlib.closing(sock):
        sock.settimeout(ANSWER_SECONDS)
        transport.send_packet(sock, encode_report(ListenerWanted(os.getpid())))
        packet = transport.receive_packet(sock, max_fds=1)
    if len(packet.fds) != 1:
        packet.close()
        raise ProtocolError("the launcher holds the port, and gave no socket")
    return socket.socket(fileno=packet.fds[0])
