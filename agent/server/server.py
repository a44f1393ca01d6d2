"""The agent's life: open the sockets, serve until told to stop, leave no loader and no socket behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
from typing import TYPE_CHECKING, Any

from weightcache.errors import AgentUnavailable, WeightcacheError
from weightcache.server import adopt, loads, lookout, verify
from weightcache.server.app import SETTLE_SECONDS, Agent
from weightcache.server.doors import Doors
from weightcache.server.fdstore import FdStore
from weightcache.server.journal import event
from weightcache.server.keeper import ProcessOnly
from weightcache.server.listen import NOTHING
from weightcache.server.readiness import Readiness
from weightcache.server.statusfile import StatusFile

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from weightcache.server.adopt import Adoption
    from weightcache.server.listen import Handed
    from weightcache.server.notify import Manager
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

ANSWER_SECONDS = 2.0
"""How long an agent that gives up goes on answering the clients that wait."""

_THREADS = 4
_POLL_SECONDS = 0.02


class Server:
    """Serves one rank. ``manager`` is the service manager, if there is one; ``handed`` is what it passed."""

    def __init__(self, settings: Settings, manager: Manager | None = None, handed: Handed = NOTHING) -> None:
        self.settings = settings
        self.manager = manager
        self.handed = handed
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises WeightcacheError when the sockets cannot be had, or when a manager asked for a load that failed.
        """
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_THREADS, "weightcache"))
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._stop.set)
        # A handler that does nothing: SIG_IGN would be inherited by every loader.
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        adoption = adopt.sort_out(self.handed.others)
        doors = Doors(self.settings, self.handed.public, must=not adoption.sets)
        store = FdStore(self.manager) if self.manager else None
        agent = Agent(self.settings, store or ProcessOnly())
        log.addHandler(agent.history)
        status = StatusFile(agent)
        agent.adopt(adopted.complete for adopted in adoption.sets)
        agent.dispose(adoption.fds)
        load = agent.recover() and self.settings.load and agent.sets.newest("target") is None
        doors.serve(agent)
        if lookout.wanted(self.settings):
            agent.spawn(lookout.keep(agent), optional=True)
        if adoption.sets:  # whoever uses them has renewed its lease by then
            loop.call_later(SETTLE_SECONDS, agent.settle)
        try:
            if self.manager and store:
                store.changed = agent.touch
                await self._report(agent, doors, Readiness(agent, self.manager), _prepare(agent, store, adoption), load)
            else:
                if load:
                    _load(agent)
                await self._stop.wait()
            agent.forget_failure()  # whoever starts the rank again means it
        finally:
            log.info("stopping", extra=event("stopping"))
            doors.stop()
            agent.leaving = agent.leaving or AgentUnavailable(f"the agent of rank {self.settings.rank} is stopping")
            await loads.cancel(agent, "the agent was stopped")
            await doors.close()
            status.close()
            await agent.background()
            if store:
                await store.close()

    async def _report(
        self, agent: Agent, doors: Doors, readiness: Readiness, prepared: Coroutine[Any, Any, None], load: bool
    ) -> None:
        """Serve until the signal, and tell the manager. Raises the failure of a first load, after all were told."""
        rising = asyncio.ensure_future(readiness.rise(prepared, load and not doors.activated, doors.activated and load))
        stopped = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {rising, stopped}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if rising.done():
                await rising
                await stopped
        except WeightcacheError as error:
            readiness.fail(error)
            agent.give_in(error)
            await _until(lambda: doors.quiet, ANSWER_SECONDS)
            # In the same step: who comes from now on waits for the next agent instead of being hung up on by this one.
            doors.stop()
            raise
        finally:
            for task in either:
                task.cancel()
            await asyncio.wait(either)
            await readiness.close()


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll; for conditions of the kernel's that nobody announces."""
    for _ in range(int(seconds / _POLL_SECONDS)):
        if condition():
            return
        await asyncio.sleep(_POLL_SECONDS)


async def _prepare(agent: Agent, store: FdStore, adoption: Adoption) -> None:
    await store.adopt(adoption.sets, adoption.names)
    await verify.adopted(agent)


def _load(agent: Agent) -> None:
    try:
        loads.begin(agent)
    except WeightcacheError as error:
        log.warning("nothing is loaded at start: %s", error.message)
