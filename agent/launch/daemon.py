"""Daemon mode: agents for this launch, started if none run, waited for until they hold its model."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import checkpoint, client, paths, protocol
from weightcache.errors import AgentUnavailable, Mismatch, UsageError, WeightcacheError
from weightcache.launch import daemon_config, detached, explain, layout, precheck, sockets
from weightcache.launch.console import say
from weightcache.parallel import parallel
from weightcache.paths import RankPaths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.config import Config, RankConfig
    from weightcache.launch.arguments import Options
    from weightcache.launch.sockets import Agent, Agents
    from weightcache.protocol import LoadProgress
    from weightcache.sglang_options import Given

START_TIMEOUT = 30.0
WAIT_SECONDS = 3600.0
PROGRESS_EVERY = 5.0


def agents(options: Options, config: Config, given: Given, python: str) -> Agents:
    """The agents that hold this launch's model, started and waited for. Raises a WeightcacheError."""
    _check_checkpoint(given)
    if (nodes := layout.deployment(given).node_count) > 1:
        raise UsageError(
            f"--nnodes {nodes}: daemon mode starts agents on one host, and a command line does not name the others: "
            "run agents with nodes in [deployment] on all of them, and launch with --weight-cache-mode client"
        )
    backend, wanted = layout.rank_configs(given)
    places = _places(options, config)
    found = _running(places, config, given, backend, wanted)
    if found is None:
        home = _home(options, config)
        with detached.exclusive(home, START_TIMEOUT):
            found = _running([*places, home], config, given, backend, wanted)
            if found is None:
                found = _start(home, options, config, given, python, backend, wanted)
    _require_keepers(found)
    _require_model(found, given)
    _load(found, WAIT_SECONDS if options.wait_seconds is None else options.wait_seconds)
    found = sockets.discover(found.directory, config, given.text("device")).only(wanted)
    if not found.agents:
        raise found.missing()
    _require_model(found, given)
    return found


def _check_checkpoint(given: Given) -> None:
    path = given.text("model_path")
    if not path and not given.opaque:
        raise UsageError("--model-path is missing: which model should be held?")
    if path and (Path(path).exists() or path.startswith(("/", ".", "~"))):
        checkpoint.check(Path(path))


def _places(options: Options, config: Config) -> list[Path]:
    """Where agents of this launch may run already."""
    chosen = sockets.directory(options.runtime_dir, config)
    explicit = options.runtime_dir or config.agent.runtime_dir or os.environ.get("WEIGHTCACHE_RUNTIME_DIR")
    return [chosen] if explicit else list(dict.fromkeys([chosen, paths.user_runtime_dir()]))


def _home(options: Options, config: Config) -> Path:
    """Where this launch starts its agents: a directory that was asked for, or the user's own."""
    chosen = sockets.directory(options.runtime_dir, config)
    if chosen == paths.SYSTEM_RUNTIME_DIR:
        chosen = paths.user_runtime_dir()
    return daemon_config.private_directory(chosen)


def _running(
    places: Sequence[Path], config: Config, given: Given, backend: str, wanted: Sequence[RankConfig]
) -> Agents | None:
    """The agents that already serve this launch's ranks; None if none does. Raises AgentUnavailable for only some."""
    for place in dict.fromkeys(places):
        found = sockets.discover(place, config, given.text("device"))
        for rank, error in found.problems:
            # Somebody listens there but is no use: a second agent could not take its place.
            if not isinstance(error, AgentUnavailable) and any(entry.rank == rank for entry in wanted):
                raise type(error)(f"rank {rank}: {error.message}")
        if found.backend != backend or not found.agents:
            continue
        keys = [entry.gpu if backend == "cuda" else f"rank:{entry.rank}" for entry in wanted]
        absent = [key for key in keys if key not in found.sockets]
        if len(absent) == len(keys):
            continue
        if absent:
            raise AgentUnavailable(
                f"agents in {place} serve some of this launch's ranks, but none serves {', '.join(absent)}: "
                "start those too, or stop the others"
            )
        return found.only(wanted)
    return None


def _start(
    home: Path, options: Options, config: Config, given: Given, python: str, backend: str, wanted: Sequence[RankConfig]
) -> Agents:
    ranks = [RankPaths(home, entry.rank) for entry in wanted]
    for where in ranks:
        if (pid := detached.listener(where.public)) is not None:
            raise AgentUnavailable(
                f"process {pid} listens at {where.public} already, and no agent for this launch answers there; its log "
                f"ends with: {detached.last_lines(where)}"
            )
    arguments = daemon_config.model_arguments(options.sglang)
    deployed = layout.deployment(given)
    if backend == "host" and deployed.replicas > 1:  # they share the first one's memory
        deployed = replace(deployed, dp_size=1)
    text = daemon_config.render(python, arguments, backend, wanted, options.unproven, deployed)
    _run(ranks, daemon_config.write(home, text))
    found = sockets.discover(home, config, given.text("device")).only(wanted)
    if not found.agents:
        raise found.missing()
    return found


def _run(places: Sequence[RankPaths], file: Path) -> None:
    """Start agents and wait until all answer; all or none."""
    keep = detached.can_keep()
    started: list[detached.Detached] = []
    try:
        for where in places:
            one = detached.start(where, file, keep)
            started.append(one)
            what = "an agent under a keeper" if keep else "an agent"
            say(f"rank {where.rank}: started {what}, process {one.pid}, log {detached.log_file(where)}")
        deadline = time.monotonic() + START_TIMEOUT
        for one in started:
            one.wait(deadline)
    except BaseException:
        detached.stop(started)
        raise
    numbers = " ".join(str(one.pid) for one in started)
    if keep:
        say(
            "the weights stay after this server ends, and after a crash of their agent; "
            f"`kill {numbers}` stops keepers and agents and frees the memory"
        )
    else:
        say(f"the weights stay after this server ends; `kill {numbers}` stops the agents and frees the memory")
        say(f"the weights will not survive an agent's crash: for a keeper, install sdnotify for {sys.executable}")


def _require_keepers(found: Agents) -> None:
    """Say, or raise AgentUnavailable where nothing is held yet, that an agent outlived its keeper."""
    for agent in found.agents:
        pid = detached.listener(agent.path)
        if not pid or detached.alive(pid):
            continue
        number = agent.status.pid if agent.status else "PID"
        what = f"rank {agent.rank}: the keeper of its agent has ended"
        if agent.state != "ready":
            raise AgentUnavailable(f"{what}, so that it can take no weights: `kill {number}` and launch again")
        say(f"{what}: the weights will not survive the agent's crash; `kill {number}` stops it and frees the memory")


def _require_model(found: Agents, given: Given) -> None:
    """Raise Mismatch, with the fields, if an agent certainly holds (or is configured to hold) something else."""
    for agent in found.agents:
        if differences := explain.certain(agent, given):
            names = ", ".join(row.field for row in differences)
            error = Mismatch(f"rank {agent.rank}: the agent holds another model or layout ({names})")
            error.differences = differences
            raise error
        configured = agent.status.model if agent.status and not agent.status.sets else ""
        wanted = precheck.model_directory(given)
        if configured and wanted and Path(configured).is_dir() and Path(configured).resolve() != wanted:
            raise Mismatch(f"rank {agent.rank}: the agent is configured for {configured}, not for {wanted}")


def _load(found: Agents, seconds: float) -> None:
    """Have every agent load its model and wait until all hold it. Raises the first failure."""
    waiting = [agent for agent in found.agents if agent.state != "ready"]
    tasks = [partial(_load_one, agent, seconds, i == 0) for i, agent in enumerate(waiting)]
    for agent, result in zip(waiting, parallel(tasks, seconds + client.DEFAULT_TIMEOUT + 1), strict=True):
        if isinstance(result, WeightcacheError):
            raise type(result)(f"rank {agent.rank}: {result.message}")
        if isinstance(result, BaseException):
            raise AgentUnavailable(f"rank {agent.rank}: no answer while loading ({result!r})")


def _load_one(agent: Agent, seconds: float, talk: bool) -> None:
    phase, shown = "", 0.0

    def show(progress: LoadProgress) -> None:
        nonlocal phase, shown
        if not talk or (progress.phase == phase and time.monotonic() - shown < PROGRESS_EVERY):
            return
        phase, shown = progress.phase, time.monotonic()
        total = f" of {progress.bytes_total / 1e9:.1f}" if progress.bytes_total else ""
        say(f"rank {agent.rank}: {progress.phase}, {progress.bytes_done / 1e9:.1f}{total} GB, {progress.seconds:.0f} s")

    with client.Conversation(agent.path) as conversation:
        conversation.request(protocol.Load(seconds), protocol.Loaded, seconds + client.DEFAULT_TIMEOUT, show)
