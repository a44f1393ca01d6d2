"""Which node of a deployment this host is, and which addresses the nodes have."""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError
from weightcache.parallel import parallel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE = "WEIGHTCACHE_NODE_RANK"
RESOLVE_SECONDS = 5.0
"""For the names of all nodes together."""

_HINT = f"set {VARIABLE} to its number, from 0"


def this_node(
    nodes: Sequence[str],
    asked: int | None = None,
    environment: Mapping[str, str] = os.environ,
    seconds: float = RESOLVE_SECONDS,
) -> int:
    """The number of this host among ``nodes``: as asked, as $WEIGHTCACHE_NODE_RANK says, by name, or by address.

    Raises ConfigError where none of them is this host, or several are.
    """
    if asked is not None:
        return _checked(asked, "--node", nodes)
    if (text := environment.get(VARIABLE, "")) != "":
        if not re.fullmatch(r"\d{1,5}", text, re.ASCII):
            raise ConfigError(f"{VARIABLE}: expected the number of a node, got {text!r}")
        return _checked(int(text), VARIABLE, nodes)
    if len(nodes) < 2:
        return 0
    own = socket.gethostname()
    found = [i for i, node in enumerate(nodes) if _same_name(node, own)]
    if not found:
        known = addresses(nodes, seconds)
        found = [i for i, node in enumerate(nodes) if any(map(_is_own, known[node]))]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(nodes[i] for i in found)
        raise ConfigError(f"deployment.nodes: this host ({own}) is {names} at the same time: {_HINT}")
    raise ConfigError(f"deployment.nodes: this host ({own}) is none of {', '.join(nodes)}: {_HINT}")


def addresses(nodes: Sequence[str], seconds: float = RESOLVE_SECONDS) -> dict[str, tuple[str, ...]]:
    """The addresses of each node; none where its name is not known, or not within ``seconds``."""
    answers = parallel([partial(_resolve, node) for node in nodes], seconds)
    return {node: answer if isinstance(answer, tuple) else () for node, answer in zip(nodes, answers, strict=True)}


def _checked(number: int, where: str, nodes: Sequence[str]) -> int:
    count = max(len(nodes), 1)
    if number >= count:
        known = f"{count} nodes, 0 to {count - 1}" if count > 1 else "one node, 0"
        raise ConfigError(f"{where}: there is no node {number}: [deployment] has {known}")
    return number


def _same_name(node: str, own: str) -> bool:
    """Whether a node's name is this host's: in full, or one of them is the other one's first part."""
    node, own = node.casefold().rstrip("."), own.casefold().rstrip(".")
    if re.fullmatch(r"[\d.]+|.*:.*", node):  # an address, whose first part is no name
        return False
    return node == own or (("." not in node or "." not in own) and node.partition(".")[0] == own.partition(".")[0])


def _resolve(node: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(node, None, type=socket.SOCK_DGRAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_own(address: str) -> bool:
    """Whether an address is one of this host's: only those can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
