"""Verification: a throw-away child recomputes the digests on the device; its worst death harms nobody."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError, DamagedSet, Empty, WeightcacheError
from weightcache.protocol import LoadProgress, Progress, Verified, Verify
from weightcache.server import loads
from weightcache.server.child import start
from weightcache.server.journal import event
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.sets import ResidentSet

log = logging.getLogger("weightcache")

LONGEST_CHECK_SECONDS = 600.0


async def verify(agent: Agent, connection: Connection, _: Verify) -> None:
    """Check all resident sets, one after the other."""
    agent.settings.require_operator(connection.peer, "verify weights")
    started = time.monotonic()
    async with agent.verifying:
        sets = list(agent.sets)
        if not sets:
            raise Empty(f"rank {agent.settings.rank} holds nothing to verify")
        total, done = sum(s.bytes for s in sets), 0
        for resident in sets:
            seconds = round(time.monotonic() - started, 1)
            await connection.send(Progress(LoadProgress("verifying", done, total, seconds)))
            await check(agent, resident)
            done += resident.bytes
    await connection.send(Verified(len(sets), total, round(time.monotonic() - started, 3)))


async def check(agent: Agent, resident: ResidentSet) -> None:
    """Check one set. Raises DamagedSet (the rank is degraded from then on), or what kept the check from an answer."""
    started = time.monotonic()
    try:
        await _check(agent, resident)
    except WeightcacheError as error:
        failed = event("verification-failed", set=resident.id, code=error.code)
        log.error("verification failed: %s", error.message, extra=failed)  # noqa: TRY400 - a sentence, no traceback
        raise
    seconds = time.monotonic() - started
    found = event("verified", set=resident.id, bytes=resident.bytes, seconds=round(seconds, 3))
    log.info("set %s verified: %d bytes in %.1f s", resident.id, resident.bytes, seconds, extra=found)


async def _check(agent: Agent, resident: ResidentSet) -> None:
    settings = agent.settings
    loader = settings.config.loader
    if not loader.command:
        raise ConfigError("[loader] command is not set, so there is nothing that could verify")
    command = [
        *loader.command,
        "check",
        *("--socket", str(settings.paths.status)),
        *("--set", resident.id),
        *("--backend", settings.config.memory.backend),
        "--json",
    ]
    child = await start(
        command, loads.environment(settings, {}), lambda line: log.info("check: %s", line), settings.loader_socket
    )
    try:
        limit = min(loader.timeout_seconds, LONGEST_CHECK_SECONDS)
        await first(child.exited, seconds=limit)
        if not child.exited.is_set():
            raise WeightcacheError(f"the check of set {resident.id} did not end within {limit:g} s")
    finally:
        await child.stop()
    if child.status == 0:
        return
    if child.status == DamagedSet.exit_status and (verdict := _damage(list(child.lines))) is not None:
        resident.damage = f"set {resident.id} is damaged: {verdict}"
        agent.touch()
        raise DamagedSet(resident.damage)
    raise WeightcacheError(f"the check of set {resident.id} {child.describe()}")


def _damage(lines: list[str]) -> str | None:
    """What the check said about damage in its JSON line; None if it said nothing of the kind."""
    for line in reversed(lines):
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(body, dict) and body.get("code") == DamagedSet.code:
            return str(body.get("message", "digests differ"))[:2000]
    return None
