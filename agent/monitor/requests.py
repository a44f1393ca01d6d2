"""How many requests an attached engine has, asked of its own HTTP server: on this host only, and never waited for.

SGLang 0.5.17 and 0.5.23 both answer ``GET /v1/loads?include=core`` from shared memory, without their scheduler. Each
answer is a line in the engine's access log, so that it is asked seldom.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import psutil

from weightcache.monitor import fetch

TIMEOUT_SECONDS = 0.5
"""For the whole exchange with one server."""

PERIOD_SECONDS = 5.0
"""Between two questions to one server."""

MOST_AT_ONCE = 32
MAX_ANSWER = 64 * 1024
MAX_COUNT = 10**9
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000


class Address(NamedTuple):
    """Where a server listens; ``host`` is an address of this host, never a name."""

    host: str
    port: int


class Load(NamedTuple):
    """Requests of a server, all its data parallel ranks together."""

    running: int
    waiting: int


def address(argv: Sequence[str]) -> Address | None:
    """Where the server with this command line answers in plain HTTP on this host; None if it does not, or who knows.

    Names other than localhost are not looked up: that could take long.
    """
    if not argv or _last(argv, "--ssl-certfile") is not None:
        return None
    port = _last(argv, "--port")
    if port is None and _last(argv, "--config") is not None:  # it may say another one
        return None
    if port is not None and not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        return None
    host = _own(_last(argv, "--host") or DEFAULT_HOST)
    return Address(host, int(port or DEFAULT_PORT)) if host else None


def ask(server: Address) -> Load:
    """The load of one server. Raises something if it does not answer in time, wants a key, or says something else."""
    return _parse(fetch.get(server, "/v1/loads?include=core", TIMEOUT_SECONDS, MAX_ANSWER))


class Requests:
    """The latest answers of servers, each asked in a thread of its own; None is no answer, for whatever reason."""

    def __init__(self, ask: Callable[[Address], Load] = ask) -> None:
        self._ask = ask
        self._lock = threading.Condition()
        self._loads: dict[Address, Load | None] = {}
        self._asked: dict[Address, float] = {}
        self._under_way: set[Address] = set()

    def now(self, servers: Iterable[Address], patience: float = 0.0) -> dict[Address, Load | None]:
        """What these servers said last; those that are due are asked.

        First answers are waited for, all together at most ``patience`` seconds.
        """
        wanted = set(servers)
        with self._lock:
            self._loads = {server: load for server, load in self._loads.items() if server in wanted}
            self._asked = {server: when for server, when in self._asked.items() if server in wanted}
            for server in sorted(wanted):
                self._start(server)
            self._lock.wait_for(lambda: wanted <= self._loads.keys(), patience)
            return {server: self._loads.get(server) for server in wanted}

    def _start(self, server: Address) -> None:
        due = time.monotonic() - self._asked.get(server, -PERIOD_SECONDS) >= PERIOD_SECONDS
        if due and server not in self._under_way and len(self._under_way) < MOST_AT_ONCE:
            self._asked[server] = time.monotonic()
            self._under_way.add(server)
            threading.Thread(target=self._run, args=(server,), name="requests", daemon=True).start()

    def _run(self, server: Address) -> None:
        load = None
        with contextlib.suppress(Exception):  # what a stranger sends must not print a traceback on a screen
            load = self._ask(server)
        with self._lock:
            self._under_way.discard(server)
            if server in self._asked:
                self._loads[server] = load
            self._lock.notify_all()


def _last(argv: Sequence[str], option: str) -> str | None:
    """The value of the last ``option VALUE`` or ``option=VALUE``; empty for one without a value."""
    found = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else following
    return found


def _own(host: str) -> str:
    """``host`` as an address that reaches this host, or empty."""
    if host == "localhost":
        return DEFAULT_HOST
    try:
        parsed = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    if parsed.is_unspecified:
        return "127.0.0.1" if parsed.version == 4 else "::1"
    if parsed.is_loopback:
        return str(parsed)
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return str(parsed) if str(parsed) in own else ""


def _parse(body: bytes) -> Load:
    """Raises ValueError for anything but SGLang's answer."""
    answer: Any = json.loads(body)
    loads = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(loads, list) or not loads:
        raise ValueError("no loads")
    counts = [tuple(_count(load, name) for name in ("num_running_reqs", "num_waiting_reqs")) for load in loads]
    return Load(sum(running for running, _ in counts), sum(waiting for _, waiting in counts))


def _count(load: Any, name: str) -> int:
    count = load.get(name) if isinstance(load, dict) else None
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise ValueError(name)
    return count
