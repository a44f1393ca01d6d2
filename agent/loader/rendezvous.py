"""Where SGLang's ranks find each other: ports that no engine on this host would choose, and the network to use.

SGLang 0.5.17 takes a free port of the kernel's ephemeral range, 0.5.23 one of 22000 to 29999, and both bind it only
after ten seconds of imports, when an engine that starts meanwhile may have it. What is chosen here lies below both
ranges. With attention data parallelism SGLang derives more ports from it, up to 13 above.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
from collections.abc import Mapping, Sequence

from weightcache.errors import LoadFailed

LOWEST, HIGHEST = 10000, 21900
SPAN = 16
TRIES = 200

_SIOCGIFADDR = 0x8915


def arguments(nodes: Sequence[str], port: int) -> tuple[str, str]:
    """SGLang's argument: the port after ``port`` of the first of several nodes, or a free one of this host."""
    host = f"[{nodes[0]}]" if nodes and ":" in nodes[0] else (nodes[0] if nodes else "127.0.0.1")
    return "--dist-init-addr", f"{host}:{port + 1 if nodes else free_span()}"


def free_span() -> int:
    """The first of SPAN ports that nobody uses now. Raises LoadFailed."""
    for _ in range(TRIES):
        first = random.randrange(LOWEST, HIGHEST, SPAN)  # noqa: S311  not a secret
        if all(map(_free, range(first, first + SPAN))):
            return first
    raise LoadFailed(f"no {SPAN} free ports in a row were found between {LOWEST} and {HIGHEST}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def variables(address: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What tells SGLang and gloo the ``address`` by which other nodes reach this host, unless the operator did.

    gloo would take the interface of the host's own name, which on many hosts is the loopback one, and SGLang that of
    the way to the Internet, which a cluster need not have.
    """
    found = {}
    if address and not (environment.get("SGLANG_HOST_IP") or environment.get("HOST_IP")):
        found["SGLANG_HOST_IP"] = address
    if "GLOO_SOCKET_IFNAME" not in environment and (name := _interface(address)):
        found["GLOO_SOCKET_IFNAME"] = name
    return found


def _interface(address: str) -> str:
    """The name of the network interface with an IPv4 address, or an empty text."""
    names: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        names = socket.if_nameindex()
    for _, name in names:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
