"""The exporter: the metrics of all ranks of this host at one address, for Prometheus, and their state for other nodes.

It subscribes to the agents once. A scrape is answered with what they said last, and never waits for one of them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError
from weightcache.monitor import brief, gpus, metrics
from weightcache.monitor.live import Live
from weightcache.monitor.web import HEAD_BYTES, Answer, Request, Web
from weightcache.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightcache.monitor.gpus import Gpu
    from weightcache.monitor.site import Site
    from weightcache.monitor.snapshot import Source

BACKLOG = 512
AGENT_SECONDS = 1.0
"""An agent in turmoil is heard of at most this often."""

FIRST_SECONDS = 2.0
"""How long the first answers of all agents are waited for."""

SAME_SECONDS = 0.5
"""Scrapes within this get the same text: however many there are, they cost little."""

GPU_SECONDS = 60.0
"""How often it is looked which GPUs there are."""

_FIRST_FD = 3


class Pages:
    """What is served. ``find`` finds the GPUs, in a thread of its own: /proc may hang where the driver does."""

    def __init__(self, source: Source, find: Callable[[], Mapping[str, Gpu]] = gpus.find) -> None:
        self._source = source
        self._find = find
        self._gpus: Mapping[str, Gpu] = {}
        self._made: dict[str, tuple[float, Answer]] = {}
        self._looked = threading.Event()
        threading.Thread(target=self._look, name="gpus", daemon=True).start()
        self._looked.wait(FIRST_SECONDS)

    def metrics(self, request: Request) -> Answer:
        """All metrics, in the format that the client asks for."""
        wanted = metrics.OPENMETRICS if metrics.OPENMETRICS in request.headers.get("accept", "") else ""
        return self._latest(wanted, lambda: Answer(200, *metrics.text(self._source.snapshot(), self._gpus, wanted)))

    def status(self, _: Request) -> Answer:
        """What all ranks hold, for `wcache status` on the other nodes of a deployment."""
        return self._latest(
            "status", lambda: Answer(200, brief.encode(self._source.snapshot().ranks), "application/json")
        )

    def health(self, _: Request) -> Answer:
        """One line a rank; 503 when no agent answers."""
        lines, answering = [], False
        for view in self._source.snapshot().ranks:
            up = view.agent == "up"
            answering |= up
            why = view.status.state if up else f"{view.agent}: {view.reason.message if view.reason else ''}"
            lines.append(f"rank {view.status.rank}: {escape(why)}\n")
        return Answer(200 if answering else 503, "".join(lines or ["no rank is known\n"]).encode())

    def _latest(self, name: str, make: Callable[[], Answer]) -> Answer:
        made = self._made.get(name)
        if made is None or time.monotonic() - made[0] > SAME_SECONDS:
            made = self._made[name] = time.monotonic(), make()
        return made[1]

    def _look(self) -> None:
        never = threading.Event()
        while True:
            self._gpus = self._find()
            self._looked.set()
            never.wait(GPU_SECONDS)


def run(site: Site, address: tuple[str, int], announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError where ``address`` cannot be had.

    Threads that hear agents are left behind: nothing is to be waited for at the end.
    """
    handed = _handed()
    live = Live(site, None, AGENT_SECONDS, None)
    live.first(FIRST_SECONDS)
    asyncio.run(_serve(Pages(live), handed, address, announce))


async def _serve(
    pages: Pages, handed: list[socket.socket], address: tuple[str, int], announce: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    web = Web({"/metrics": pages.metrics, "/status": pages.status, "/health": pages.health})
    if handed:
        servers = [
            await asyncio.start_server(web.talk, sock=sock, limit=HEAD_BYTES, backlog=BACKLOG) for sock in handed
        ]
    else:
        servers = [await _listen(web, address)]
    where = ", ".join(_url(sock) for server in servers for sock in server.sockets)
    announce(f"metrics at {where}")
    _ready(f"metrics at {where}")
    await stop.wait()


async def _listen(web: Web, address: tuple[str, int]) -> asyncio.Server:
    host, port = address
    try:
        return await asyncio.start_server(web.talk, host, port, limit=HEAD_BYTES, backlog=BACKLOG)
    except OSError as error:  # a name that means nothing is one, too
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise ConfigError(f"cannot listen at {shown}: {why} (exporter.listen, or --listen)") from None


def _handed() -> list[socket.socket]:
    """Listening sockets from the service manager (sd_listen_fds(3))."""
    pid, count = os.environ.get("LISTEN_PID"), os.environ.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    return [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


def _ready(status: str) -> None:
    """Tell the service manager, if there is one."""
    if os.environ.get("NOTIFY_SOCKET"):
        importlib.import_module("sdnotify").SystemdNotifier().notify(f"READY=1\nSTATUS={status}")
