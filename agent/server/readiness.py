"""What the service manager is told: when the rank is up, what it is doing, that it is alive.

READY=1 means: the weights are resident, or nothing is to be loaded by itself. A first start whose load fails ends the
process after its queue was answered, so that ``systemctl start`` fails with the reason; the failed marker keeps the
automatic restart from loading again. Once READY was said, no failure ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError, WeightcacheError, from_code
from weightcache.server import loads, report
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from weightcache.server.app import Agent
    from weightcache.server.notify import Manager
    from weightcache.server.production import Production

log = logging.getLogger("weightcache")

BEAT_SECONDS = 1.0
EXTENSION_SECONDS = 120.0
"""What a sign of life buys while starting, beyond the agent's limit for a check, or for a loader that shows none."""

ACTIVATION_SECONDS = 2.0
"""How long a client whose connection started the agent may take to say what it wants."""


class Readiness:
    """Reports to one manager."""

    def __init__(self, agent: Agent, manager: Manager) -> None:
        self._agent = agent
        self._manager = manager
        self._text = ""
        self._beat: asyncio.TimerHandle | None = None
        self._dog: asyncio.TimerHandle | None = None
        self.up = asyncio.Event()
        agent.observers.append(self._changed)
        agent.need = self._need

    async def rise(self, prepared: Awaitable[None], load: bool, activated: bool) -> None:
        """Wait until the rank is up and say so. Raises what made its first load impossible.

        ``prepared`` is what has to be done before; ``load`` asks for a load now; ``activated`` means that a client's
        connection started this agent, so that its request decides.
        """
        self._watchdog()
        self._report()
        agent = self._agent
        began = self._begin() if load else None
        holding = len(agent.sets) > 0
        await prepared
        if activated and not began:
            await self._requested()
        # Also the load that this start was for, or one that replaces a damaged set. A donor's is its own affair.
        production = began or (agent.production if activated or holding else None)
        if production and production.source == "loader":
            await self._loading(production)
        elif load and agent.settings.error and not len(agent.sets):
            raise ConfigError(agent.settings.error.message)
        await self._manager.ready()
        self.up.set()
        self._report()

    def _begin(self) -> Production | None:
        try:
            return loads.begin(self._agent)
        except WeightcacheError as error:
            log.warning("nothing is loaded at start: %s", error.message)
            return None

    async def _requested(self) -> None:
        """Wait for the load that the first clients ask for, if they do."""
        deadline = time.monotonic() + ACTIVATION_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self._agent.production:
            await self._agent.changes.wait(left)

    async def _loading(self, production: Production) -> None:
        seen = None
        while not production.ended.is_set():
            if production.alive_at != seen:
                seen = production.alive_at
                self._need(self._agent.settings.config.loader.stall_seconds)
            self._report()
            await first(production.ended, seconds=BEAT_SECONDS)
        if production.error and not len(self._agent.sets):
            raise from_code(production.error.code, production.error.message)

    def _need(self, seconds: float) -> None:
        if not self.up.is_set():
            self._manager.extend(EXTENSION_SECONDS + seconds)

    # -- STATUS --------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self._beat is None:
            self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS / 4, self._report)

    def _report(self) -> None:
        if self._beat:
            self._beat.cancel()
        self._beat = None
        text = report.one_line(self._agent)
        if text != self._text:
            self._text = text
            self._manager.status(text)
        if self._agent.production:  # its progress changes without anybody being told
            self._beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._report)

    def fail(self, error: WeightcacheError) -> None:
        """The last STATUS of a process that gives up."""
        self._manager.status(f"failed: {error.message}")

    # -- WATCHDOG ------------------------------------------------------------------------------------------------------

    def _watchdog(self) -> None:
        """Ping from the event loop, so that a loop that hangs is noticed."""
        if self._manager.watchdog:
            self._manager.alive()
            self._dog = asyncio.get_running_loop().call_later(self._manager.watchdog / 3, self._watchdog)

    async def close(self) -> None:
        """Say that the agent stops, and nothing after that."""
        self._agent.observers.remove(self._changed)
        for timer in (self._beat, self._dog):
            if timer:
                timer.cancel()
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                await self._manager.stopping()
        except (TimeoutError, WeightcacheError):
            return
