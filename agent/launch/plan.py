"""What ``wcache-launch`` is to run: whose agents, which directive, what it needs besides. Decided before each start."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from weightcache.config import Config, RankConfig
from weightcache.engine.directive import Directive
from weightcache.errors import UsageError, WeightcacheError
from weightcache.launch import caches, child, daemon, explain, layout, listener, session, sockets
from weightcache.launch.arguments import Options
from weightcache.launch.console import say
from weightcache.launch.refusals import refused
from weightcache.sglang_options import Given
from weightcache.warm.messages import Layout
from weightcache.warm.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.launch.slot import Slot


def launched(options: Options, config: Config, launch: Given, python: str) -> session.Launch:
    """What to run, as far as options, arguments and agents say it. Raises a WeightcacheError if that is nothing."""
    directive = _directive(options, config, launch, python)
    strict = options.reaction == "error"
    port = launch.number("port", listener.DEFAULT_PORT)
    return session.Launch(python, options.sglang, directive, strict, port, _local_ranks(launch))


@contextmanager
def started(
    options: Options,
    config: Config,
    launch: Given,
    python: str,
    port: socket.socket | None,
    slot: Slot | None = None,
) -> Iterator[session.Launch]:
    """What to run, decided now; inside the block, what it needs besides is held."""
    began = time.monotonic()
    found = launched(options, config, launch, python)
    with caches.kept(options.levers, config.compiled, python) as kept:
        directive = replace(found.directive, warmed=kept.warmed(found.arguments))
        found = replace(found, directive=directive, variables=kept.variables, listener=port, began=began)
        # In a slot nobody need look whether the server listens: it says so.
        yield found if slot is None else replace(found, slot=slot, port=None)


def pool(options: Options, launch: Given) -> Pool | None:
    """Where parked processes for the next start are kept, if there are to be any."""
    if "workers" not in options.levers:
        return None
    attention = launch.flag("enable_dp_attention") or (launch.number("attn_dp_size") or 1) > 1
    shape = Layout(_local_ranks(launch), launch.number("dp_size") or 1, attention)
    return Pool(child.fresh, shape, say)


def of_this_launch(found: sockets.Agents, launch: Given, ask_driver: bool) -> sockets.Agents:
    """The agents whose state matters to this launch. Only the driver knows its GPUs, and asking takes time."""
    if not found.agents:
        return found
    try:
        if found.backend == "host":
            return found.only([RankConfig(rank) for rank in layout.ranks(launch)][: layout.reporting(launch)])
        if ask_driver:
            return found.only(layout.rank_configs(launch)[1])
        return found if len(found.agents) == len(layout.ranks(launch)) else replace(found, agents=())
    except WeightcacheError:
        return found


def _directive(options: Options, config: Config, launch: Given, python: str) -> Directive:
    strict = options.reaction == "error"
    from_disk = ""
    if refusal := refused(launch):
        if strict:
            raise UsageError(refusal)
        from_disk = refusal
    if options.mode == "daemon":
        found = daemon.agents(options, config, launch, python)
    else:
        where = sockets.directory(options.runtime_dir, config)
        found = sockets.discover(where, config, launch.text("device"))
    if not found.agents and not from_disk:
        error = found.missing()
        if strict or options.explain:
            raise error
        from_disk = error.message
    if from_disk:
        say(f"{from_disk}: the weights will be loaded from disk")
    elif options.mode == "client":
        for sentence in explain.early(of_this_launch(found, launch, ask_driver=False), launch):
            say(sentence)
    return Directive(
        purpose="engine",
        backend=found.backend,
        sockets=found.sockets,
        group=uuid.uuid4().hex,
        on_mismatch=options.reaction,
        wait_seconds=options.wait_seconds or 0.0,
        donate=not strict and not from_disk and not options.explain,
        from_disk=from_disk,
        levers=options.levers,
    )


def _local_ranks(launch: Given) -> int:
    try:
        return layout.reporting(launch)
    except UsageError:
        return 1  # SGLang will say what is wrong
