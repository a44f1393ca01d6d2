"""A load that other hosts have begun waits for this one: the agent that leads here looks for it, and takes part.

No agent has a network, and nobody's message makes one load. While nothing is loaded here, a process of the loader's
command asks the other hosts (loader/lookout.py), and ends when one of them waits. What follows is a load like any other
that nobody asked for: the hosts meet and compare what they are, ranks that hold their weights go on with them, and what
engines use is not replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

from weightcache.errors import LoadFailed, WeightcacheError
from weightcache.server import loads
from weightcache.server.attach import require_giving
from weightcache.server.child import start
from weightcache.server.launch import take_stock
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Between two lookouts, or two tries to take part, after one that failed."""


def wanted(settings: Settings) -> bool:
    """Whether this agent is the one that looks out for its host."""
    config = settings.config
    several = config.deployment.node_count > 1 and settings.launch[0] == settings.rank
    loads_itself = config.model is not None and bool(config.loader.command) and settings.error is None
    return several and loads_itself and config.deployment.follow


async def keep(agent: Agent) -> None:
    """Look out whenever nothing is loaded here, for as long as the agent lives."""
    pause, told = FIRST_PAUSE, ""
    while True:
        while not _idle(agent):
            await agent.changes.wait()
        try:
            node = await _look(agent)
            if node is None:
                continue
            await _follow(agent, node)
            pause, told = FIRST_PAUSE, ""
        except WeightcacheError as error:
            if error.message != told:
                told = error.message
                log.warning("a load of other hosts would not be joined: %s", told)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


def _idle(agent: Agent) -> bool:
    return agent.production is None and agent.drained is None and agent.leaving is None


async def _look(agent: Agent) -> int | None:
    """The node where a load waits; None where something else came first. Raises LoadFailed: nobody could look."""
    settings = agent.settings
    deployment = settings.config.deployment
    seen: list[int] = []

    def take(line: str) -> None:
        node = _node(line)
        if node is None:
            log.info("lookout: %s", line)
        elif 0 <= node < deployment.node_count:
            seen.append(node)

    command = [
        *(*settings.config.loader.command, "lookout", "--node", str(settings.node)),
        *("--nodes", ",".join(deployment.nodes), "--meet-port", str(deployment.port)),
    ]
    child = await start(command, loads.environment(settings, "host", ""), take, settings.loader_socket, signs=False)
    try:
        while not child.exited.is_set() and _idle(agent):
            await first(child.exited, agent.changes.next)
    finally:
        await child.stop()
    if not _idle(agent):
        return None
    if not seen:
        raise LoadFailed(f"the lookout {child.describe()}")
    return seen[0]


async def _follow(agent: Agent, node: int) -> None:
    """Load, as the others do. Raises what stands in the way."""
    require_giving(agent)
    await take_stock(agent, asked=False, again=False)
    if not _idle(agent):
        return
    nodes = agent.settings.config.deployment.nodes
    log.info("node %d (%s) waits with a load of all hosts: this one takes part", node, nodes[node])
    loads.begin(agent)


def _node(line: str) -> int | None:
    """The node that a line of output names."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    node = body.get("waiting") if isinstance(body, dict) else None
    return node if type(node) is int else None
