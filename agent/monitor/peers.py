"""The other nodes of a deployment, as their exporters tell it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from weightcache.config_checks import parse_address
from weightcache.monitor import brief, fetch
from weightcache.parallel import parallel

if TYPE_CHECKING:
    from weightcache.monitor.brief import RankBrief
    from weightcache.monitor.site import Site

SECONDS = 2.0
"""For all nodes together."""

MOST_WHY = 200


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node: what its exporter answered, or why it did not (``error``, empty if it did)."""

    node: int
    address: str
    ranks: tuple[RankBrief, ...] = ()
    error: str = ""


def ask(site: Site, seconds: float = SECONDS) -> tuple[Peer, ...]:
    """All other nodes at the same time."""
    names = site.config.deployment.nodes
    others = [] if site.lost else [node for node in range(len(names)) if node != site.node]
    port = parse_address(site.config.exporter.listen)[1]
    answers = parallel([partial(_ask, names[node], port, seconds) for node in others], seconds)
    return tuple(_peer(node, names[node], port, answer) for node, answer in zip(others, answers, strict=True))


def _ask(name: str, port: int, seconds: float) -> tuple[RankBrief, ...]:
    return brief.decode(fetch.get((name, port), "/status", seconds, brief.MAX_ANSWER))


def _peer(node: int, name: str, port: int, answer: tuple[RankBrief, ...] | BaseException) -> Peer:
    if not isinstance(answer, BaseException):
        return Peer(node, name, answer)
    url = f"http://[{name}]:{port}/status" if ":" in name else f"http://{name}:{port}/status"
    if isinstance(answer, OSError):
        advice = f'is weightcache-exporter running there, with [exporter] listen = "0.0.0.0:{port}"?'
        return Peer(node, name, error=f"no answer from {url} ({_why(answer)}): {advice}")
    why = str(answer)[:MOST_WHY]  # it may quote what somebody else answered
    return Peer(node, name, error=f"{url} does not answer as an exporter of this version does ({why})")


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "not in time"
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    return os.strerror(error.errno) if error.errno else str(error)
