"""Loads by the configured loader: one process per load, watched until its sets are committed or it is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from weightcache.errors import Empty, LoadFailed, WeightcacheError, from_code
from weightcache.protocol import ErrorInfo
from weightcache.server.child import start
from weightcache.server.launch import Launch, follow
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.child import Child
    from weightcache.server.production import Production
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

LINGER_SECONDS = 30.0
"""How long a loader may take to end after its commit."""

LAST_WORDS_SECONDS = 5.0
"""How long to wait for the exit status after the connection closed, and for the last packets after the exit."""

OTHERS_SECONDS = 1.0
"""How long to wait for another rank's reason after the loader ended without one of this rank's."""

SAMPLE_SECONDS = 5.0


def begin(agent: Agent, asked: bool = False, again: bool = False) -> Production:
    """Start loading the configured model. Raises what stands in the way: ConfigError, Empty, LoadFailed (back-off).

    ``asked`` means that somebody wants this load: it then takes place beside engines that use the other ranks.
    ``again`` means that ranks which hold their weights load them, too.
    """
    settings = agent.settings
    if agent.leaving:
        raise agent.leaving
    if settings.error:
        raise from_code(settings.error.code, settings.error.message)
    if settings.config.model is None:
        holds = "does not hold all weights" if len(agent.sets) else "holds no weights"
        raise Empty(f"rank {settings.rank} {holds}, and no [model] is configured that it could load")
    left = agent.backoff.left(time.monotonic())
    if left and agent.failure:
        raise LoadFailed(f"the last load failed, the next try is allowed in {left:.0f} s: {agent.failure.message}")
    agent.forget_failure()
    production = agent.start("loader", secrets.token_hex(8))
    production.asked, production.again = asked, again
    leads = settings.launch[0] == settings.rank
    job = agent.spawn(_run(agent, production, set(agent.jobs)) if leads else follow(agent, production))
    agent.jobs.add(job)
    job.add_done_callback(agent.jobs.discard)
    return production


async def cancel(agent: Agent, reason: str) -> None:
    """End the current load, if there is one, and its loader."""
    if agent.production:
        agent.give_up(agent.production, ErrorInfo("load-failed", reason), failed=False)
    if jobs := set(agent.jobs):
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)


def environment(settings: Settings, backend: str, gpu: str, **extra: str) -> dict[str, str]:
    """What the loader's command gets beside the environment of whoever runs it."""
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu and backend == "cuda" else {}
    return settings.config.loader.environment | visible | extra


async def _run(agent: Agent, production: Production, previous: set[asyncio.Task[None]]) -> None:
    if previous:  # two loaders at once would need twice the memory
        await asyncio.wait(previous)
    launch = Launch(agent, production)
    problem: ErrorInfo | None = ErrorInfo(LoadFailed.code, "the load was given up")
    try:
        await launch.gather()
        child = await _start(agent, production, launch)
        try:
            problem = await _watch(agent, production, child, launch)
        finally:
            await child.stop()
    except WeightcacheError as error:
        problem = ErrorInfo(error.code, error.message)
    finally:
        if problem:
            agent.give_up(production, problem)
        await launch.end(problem)


async def _start(agent: Agent, production: Production, launch: Launch) -> Child:
    """Start the loader's command. Raises LoadFailed."""
    settings = agent.settings
    loader, memory = settings.config.loader, settings.config.memory
    deployment, node = settings.config.deployment, settings.node
    arguments = settings.config.model.arguments if settings.config.model else ()
    tokens = {settings.rank: production.token} | {member.rank: member.token for member in launch.members}
    gpus = {settings.rank: settings.gpu} | {member.rank: member.gpu for member in launch.members}
    if memory.backend == "cuda" and len(set(filter(None, gpus.values()))) < len(gpus):
        raise LoadFailed(f"not every rank of this launch has a GPU of its own: {gpus}")
    several = deployment.node_count > 1
    meeting = ("--nodes", ",".join(deployment.nodes), "--meet-port", str(deployment.port)) if several else ()
    command = [
        *loader.command,
        "load",
        *("--backend", memory.backend),
        *("--socket-dir", str(settings.paths.directory)),
        *("--ranks", ",".join(_number(settings, rank) for rank in sorted(tokens))),
        *("--group", production.group),
        *("--arena-bytes", str(memory.arena_bytes)),
        *(("--unproven", "check") if settings.config.policy.unproven == "check" else ()),
        *(("--anew",) if production.again else ()),
        *(("--node", str(node), *meeting, "--meet-seconds", f"{deployment.meet_seconds:g}") if several else ()),
        *("--", *arguments, *deployment.arguments(node)),
    ]
    return await start(
        command,
        environment(
            settings,
            memory.backend,
            ",".join(gpus[rank] for rank in sorted(gpus)),
            WEIGHTCACHE_TOKEN=_token(tokens),
        ),
        lambda line: log.info("loader: %s", line),
        settings.loader_socket,
    )


def _token(tokens: dict[int, str]) -> str:
    if len(tokens) == 1:
        return next(iter(tokens.values()))
    return ",".join(f"{rank}={tokens[rank]}" for rank in sorted(tokens))


def _number(settings: Settings, rank: int) -> str:
    """The rank as SGLang counts it, which knows of one replica only, and the one in its agent's name if it differs."""
    inside = settings.config.deployment.in_replica(rank) if len(settings.launch) > 1 else rank
    return str(rank) if inside == rank else f"{inside}:{rank}"


async def _watch(agent: Agent, production: Production, child: Child, launch: Launch) -> ErrorInfo | None:
    """Wait for the outcome: None once it is decided, or why there will be none."""
    limits = _Limits(agent.settings, production, child)
    while not (production.left.is_set() or child.exited.is_set() or launch.failed.is_set()):
        await first(production.left, child.exited, launch.failed, seconds=limits.interval)
        if not production.left.is_set() and (problem := limits.exceeded()):
            return ErrorInfo(LoadFailed.code, f"the loader {problem}{child.last_words()}")
    if production.publisher and not production.left.is_set() and not launch.failed.is_set():
        await first(production.left, seconds=LAST_WORDS_SECONDS)
    if production.ended.is_set():
        await first(child.exited, launch.failed, seconds=LINGER_SECONDS)
        return launch.error if production.committed else None
    if not production.error and launch.members:  # what ended the loader may have happened to another rank
        await first(launch.failed, seconds=OTHERS_SECONDS)
    if launch.error and not production.error:
        return launch.error
    await first(child.exited, seconds=LAST_WORDS_SECONDS)
    if production.error:
        return production.error
    how = child.describe() if child.exited.is_set() else f"closed its connection early{child.last_words()}"
    return ErrorInfo(LoadFailed.code, f"the loader {how}")


class _Limits:
    """The two limits on a load: total time, and time without any sign of life."""

    def __init__(self, settings: Settings, production: Production, child: Child) -> None:
        self._production, self._child = production, child
        self._timeout = settings.config.loader.timeout_seconds
        self._stall = settings.config.loader.stall_seconds
        self.interval = min(SAMPLE_SECONDS, max(self._stall / 5, 0.1), max(self._timeout / 5, 0.1))
        self._seen = (0, 0)

    def exceeded(self) -> str | None:
        """What the loader did wrong, or None."""
        production = self._production
        seen = (production.changes, self._child.signs)
        if seen != self._seen:
            self._seen = seen
            production.alive_at = time.monotonic()
        if production.seconds > self._timeout:
            return f"took longer than {self._timeout:g} s (phase {production.progress.phase})"
        if time.monotonic() - production.alive_at > self._stall:
            return f"made no progress for {self._stall:g} s (phase {production.progress.phase})"
        return None
