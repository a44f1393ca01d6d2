"""Loads by the configured loader: one process per load, watched until its sets are committed or it is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from weightcache.errors import Empty, LoadFailed, from_code
from weightcache.protocol import ErrorInfo
from weightcache.server.child import start
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

SAMPLE_SECONDS = 5.0


def begin(agent: Agent, group: str = "") -> Production:
    """Start loading the configured model. Raises what stands in the way: ConfigError, Empty, LoadFailed (back-off)."""
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
    production = agent.start("loader", group or secrets.token_hex(8))
    job = agent.spawn(_run(agent, production, set(agent.jobs)))
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
    settings = agent.settings
    loader, memory = settings.config.loader, settings.config.memory
    arguments = settings.config.model.arguments if settings.config.model else ()
    command = [
        *loader.command,
        "load",
        *("--backend", memory.backend),
        *("--socket-dir", str(settings.paths.directory)),
        *("--ranks", str(settings.rank)),
        *("--group", production.group),
        *("--arena-bytes", str(memory.arena_bytes)),
        *(("--unproven", "check") if settings.config.policy.unproven == "check" else ()),
        *("--", *arguments),
    ]
    try:
        child = await start(
            command,
            environment(settings, memory.backend, settings.gpu, WEIGHTCACHE_TOKEN=production.token),
            lambda line: log.info("loader: %s", line),
            settings.loader_socket,
        )
    except LoadFailed as error:
        agent.give_up(production, ErrorInfo(error.code, error.message))
        return
    try:
        problem = await _watch(agent, production, child)
    finally:
        await child.stop()
    if problem:
        agent.give_up(production, problem)


async def _watch(agent: Agent, production: Production, child: Child) -> ErrorInfo | None:
    """Wait for the outcome: None once it is decided, or why there will be none."""
    limits = _Limits(agent.settings, production, child)
    while not production.left.is_set() and not child.exited.is_set():
        await first(production.left, child.exited, seconds=limits.interval)
        if not production.left.is_set() and (problem := limits.exceeded()):
            return ErrorInfo(LoadFailed.code, f"the loader {problem}{child.last_words()}")
    if production.publisher and not production.left.is_set():
        await first(production.left, seconds=LAST_WORDS_SECONDS)
    if production.ended.is_set():
        await first(child.exited, seconds=LINGER_SECONDS)
        return None
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
