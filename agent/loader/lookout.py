"""The ``lookout`` role: wait until another host of the deployment waits for this one with a load, say so, and end.

It asks, and nobody can tell it anything: node 0 asks all others, those ask node 0 alone, to which every load comes. An
agent that loads nothing keeps one of these; neither SGLang nor torch is imported. Whether this host then loads is the
agent's decision, and whether it fits the others is found out when they meet.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

from weightcache.errors import UsageError
from weightcache.loader import beacon
from weightcache.loader.family import end_with_parent
from weightcache.loader.meeting import named, say
from weightcache.loader.wire import Waiting
from weightcache.parallel import parallel

EVERY_SECONDS = 3.0
AT_ONCE = 16
"""How many nodes are asked in EVERY_SECONDS on an average; of more, each is asked less often."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the role's arguments."""
    parser.add_argument("--node", type=int, required=True, help="this host's number among --nodes")
    parser.add_argument("--nodes", required=True, help="all hosts that load together, in order: 10.0.0.1,10.0.0.2")
    parser.add_argument("--meet-port", type=int, required=True, help="port where loads wait for other hosts")


def run(args: argparse.Namespace) -> int:
    """Print ``{"waiting": NODE}`` once a node waits for this one, and return 0."""
    nodes = tuple(args.nodes.split(","))
    if not 0 <= args.node < len(nodes) or len(nodes) < 2 or not 0 < args.meet_port < 65535:
        raise UsageError(f"--node {args.node} of --nodes {args.nodes} at --meet-port {args.meet_port} cannot look out")
    end_with_parent()
    others = range(1, len(nodes)) if args.node == 0 else range(1)
    strange: set[int] = set()
    while True:
        for node, together in waiting(nodes, others, args.meet_port):
            if together:
                print(json.dumps({"waiting": node}), flush=True)
                return 0
            if node not in strange:
                say(f"{named(nodes, node)} waits with a load of other nodes than {args.nodes}")
                strange.add(node)
        time.sleep(EVERY_SECONDS * max(1.0, len(others) / AT_ONCE) * random.uniform(0.5, 1.5))  # noqa: S311


def waiting(nodes: tuple[str, ...], others: Sequence[int], port: int) -> Iterator[tuple[int, bool]]:
    """The nodes where a load waits, and whether it is one of the same nodes."""
    asked = [partial(beacon.look, nodes, node, port) for node in others]
    for node, answer in zip(others, parallel(asked, 2 * beacon.LOOK_SECONDS + 1), strict=True):
        if isinstance(answer, Waiting):
            yield node, answer.together
