"""Verification: a throw-away child recomputes the digests on the device; its worst death harms nobody."""

from __future__ import annotations

import json
import logging
import signal
import time
from typing import TYPE_CHECKING

from weightcache.errors import AttachFailed, ConfigError, DamagedSet, Empty, WeightcacheError
from weightcache.protocol import ErrorInfo, LoadProgress, Progress, Verified, Verify
from weightcache.server import loads
from weightcache.server.child import start
from weightcache.server.journal import event
from weightcache.server.sets import ADOPTED
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection
    from weightcache.server.sets import ResidentSet

log = logging.getLogger("weightcache")

LONGEST_CHECK_SECONDS = 300.0
"""With "before-ready", READY waits for the checks of all sets, one after the other: the manager is told of each."""

ARMED = "armed"
"""The code of the line with which a check says that all is prepared, and that it touches the set from now on."""

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})


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
            try:
                await check(agent, resident)
            except DamagedSet:
                heal(agent, resident)
                raise
            done += resident.bytes
    await connection.send(Verified(len(sets), total, round(time.monotonic() - started, 3)))


async def adopted(agent: Agent) -> None:
    """Check sets that an earlier agent left, behind everything else or (by policy) before the rank is up."""
    if not len(agent.sets):
        return
    if not agent.settings.config.loader.command:
        log.warning("what was adopted is not verified: [loader] command is not set")
    elif agent.settings.config.policy.verify_adopted == "before-ready":
        await _adopted(agent)
    else:
        agent.spawn(_adopted(agent), optional=True)


async def _adopted(agent: Agent) -> None:
    async with agent.verifying:
        for resident in agent.sets:
            if resident.damage:  # known from the earlier agent
                heal(agent, resident)
                continue
            try:
                await check(agent, resident)
            except DamagedSet:
                heal(agent, resident)
            except WeightcacheError:
                continue  # it says nothing about the bytes: a broken loader, or libraries newer than the driver
            finally:
                if ADOPTED in resident.doubts:
                    resident.doubts.remove(ADOPTED)
                agent.touch()


def heal(agent: Agent, resident: ResidentSet) -> None:
    """What the policy says about a damaged set: drop it and load again, or hold it back until an operator decides.

    A load brings all sets of the model. So the others of the damaged one's load stay until they are superseded.
    """
    if agent.settings.config.policy.damaged == "hold" or agent.sets.get(resident.id) is not resident:
        return
    agent.drop(resident)
    newest = agent.sets.newest("target")
    if agent.drained or agent.production or (newest and resident.id not in newest.record.companions):
        return
    try:
        loads.begin(agent)
    except WeightcacheError as error:
        missing = f"set {resident.id} ({resident.info.role}) was damaged and dropped, and nothing replaces it"
        reason = f"{missing}: {error.message}; once that is mended, `wcache load` brings it back"
        log.warning("%s", reason)
        agent.failure = ErrorInfo(error.code, reason)
        agent.touch()


async def check(agent: Agent, resident: ResidentSet) -> None:
    """Check one set. Raises DamagedSet (the rank is degraded from then on), or what kept the check from an answer."""
    started = time.monotonic()
    agent.need(LONGEST_CHECK_SECONDS)
    try:
        await _check(agent, resident)
    except WeightcacheError as error:
        failed = event("verification-failed", set=resident.id, code=error.code)
        log.error("verification failed: %s", error.message, extra=failed)  # noqa: TRY400 - a sentence, no traceback
        if isinstance(error, DamagedSet):
            agent.condemn(resident, error.message)
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
        *("--backend", resident.record.backend),
        *("--json", "--announce"),
    ]
    verdict: dict[str, object] = {}

    def take(line: str) -> None:
        log.info("check: %s", line)
        if body := _object(line):
            verdict.clear()
            verdict.update(body)

    environment = loads.environment(settings, resident.record.backend, resident.record.gpu)
    child = await start(command, environment, take, settings.loader_socket)
    try:
        limit = min(loader.timeout_seconds, LONGEST_CHECK_SECONDS)
        await first(child.exited, seconds=limit)
        if not child.exited.is_set():
            raise WeightcacheError(f"the check of set {resident.id} did not end within {limit:g} s")
    finally:
        await child.stop()
    if child.status == 0:
        return
    if verdict.get("code") in (DamagedSet.code, AttachFailed.code):
        raise DamagedSet(f"set {resident.id} is damaged: {str(verdict.get('message', 'digests differ'))[:2000]}")
    if verdict.get("code") == ARMED and child.status is not None and -child.status in _FAULTS:
        raise DamagedSet(f"set {resident.id} is damaged: whoever reads it dies ({child.describe()})"[:2000])
    raise WeightcacheError(f"the check of set {resident.id} {child.describe()}")


def _object(line: str) -> dict[str, object]:
    """A line of output as JSON; empty if it is something else."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
