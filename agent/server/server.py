"""The agent's life: open the sockets, serve until told to stop, leave no loader and no socket behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import AgentUnavailable, WeightcacheError
from weightcache.server import adopt, listen, loads, verify
from weightcache.server.acceptor import Acceptor
from weightcache.server.app import Agent
from weightcache.server.connection import Door
from weightcache.server.fdstore import FdStore
from weightcache.server.journal import event
from weightcache.server.keeper import ProcessOnly
from weightcache.server.listen import NOTHING, pending
from weightcache.server.readiness import Readiness
from weightcache.server.statusfile import StatusFile

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from weightcache.server.adopt import Adoption
    from weightcache.server.listen import Handed
    from weightcache.server.notify import Manager
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

ANSWER_SECONDS = 2.0
"""How long an agent that gives up goes on answering the clients that wait."""

REOPEN_SECONDS = 5.0
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
        listeners = self._open(must=not adoption.sets)
        store = FdStore(self.manager) if self.manager else None
        agent = Agent(self.settings, store or ProcessOnly())
        status = StatusFile(agent)
        self._adopt(agent, adoption)
        load = agent.recover() and self.settings.load and not len(agent.sets)
        acceptors = {door: Acceptor(agent, listener.sock, door) for door, listener in listeners.items()}
        activated = self.handed.public is not None and pending(self.handed.public)
        for acceptor in acceptors.values():
            acceptor.start()
        log.info("serving at %s", listeners[Door.PUBLIC].path)
        reopening = loop.create_task(self._reopen(agent, listeners, acceptors))
        readiness = None
        try:
            if self.manager and store:
                store.changed = agent.touch
                readiness = Readiness(agent, self.manager)
                prepared = _prepare(agent, store, adoption)
                rising = loop.create_task(readiness.rise(prepared, load and not activated, activated and load))
                await self._until_stopped(agent, rising, readiness, listeners[Door.PUBLIC].sock, acceptors)
            else:
                if load:
                    _load(agent)
                await self._stop.wait()
            agent.forget_failure()  # whoever starts the rank again means it
        finally:
            log.info("stopping", extra=event("stopping"))
            reopening.cancel()
            await asyncio.wait({reopening})
            for acceptor in acceptors.values():
                acceptor.stop()
            agent.leaving = agent.leaving or AgentUnavailable(f"the agent of rank {self.settings.rank} is stopping")
            if readiness:
                await readiness.close()
            await loads.cancel(agent, "the agent was stopped")
            for acceptor in acceptors.values():
                await acceptor.close()
            for listener in listeners.values():
                listener.close()
            status.close()
            await agent.background()
            if store:
                await store.close()

    async def _until_stopped(
        self,
        agent: Agent,
        rising: asyncio.Task[None],
        readiness: Readiness,
        public: socket.socket,
        acceptors: Mapping[Door, Acceptor],
    ) -> None:
        """Wait for the signal. Raises the failure of a first load, after everybody who asked was told."""
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({rising, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if rising.done():
                await rising
                await stopped
        except WeightcacheError as error:
            readiness.fail(error)
            agent.give_in(error)
            await _until(lambda: not pending(public) and not acceptors[Door.PUBLIC].busy, ANSWER_SECONDS)
            raise
        finally:
            for task in (rising, stopped):
                task.cancel()
            await asyncio.wait({rising, stopped})

    def _adopt(self, agent: Agent, adoption: Adoption) -> None:
        agent.adopt(adopted.complete for adopted in adoption.sets)
        if useless := adopt.describe(adoption.names):
            log.warning("closing descriptors that belong to no complete set: %s", useless)
        agent.dispose(adoption.fds)

    def _open(self, must: bool) -> dict[Door, listen.Listener]:
        """Open all sockets. An agent that holds weights (not ``must``) goes on with the one that it was handed."""
        listeners: dict[Door, listen.Listener] = {}
        try:
            if self.handed.public is not None:
                path = Path(self.handed.public.getsockname())
                listeners[Door.PUBLIC] = listen.Listener(self.handed.public, path)
            self._open_missing(listeners)
        except WeightcacheError as error:
            if not must and listeners:
                log.error("%s; serving on without", error.message)  # noqa: TRY400 - a sentence, no traceback
                return listeners
            for listener in listeners.values():
                listener.close()
            raise
        return listeners

    def _open_missing(self, listeners: dict[Door, listen.Listener]) -> None:
        settings = self.settings
        try:
            settings.paths.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise WeightcacheError(f"cannot make {settings.paths.directory}: {error.strerror}") from None
        publish_gid = settings.gid if settings.publish_gid is None else settings.publish_gid
        publish_mode = 0o600 if settings.publish_gid is None and not settings.config.policy.publishers else 0o660
        for door, path, mode, gid in (
            (Door.PUBLIC, settings.public, 0o660, settings.gid),
            (Door.PUBLISH, settings.paths.publish, publish_mode, publish_gid),
            (Door.STATUS, settings.paths.status, 0o660, settings.gid),
        ):
            if door not in listeners:
                listeners[door] = listen.bind(path, mode, gid)

    async def _reopen(
        self, agent: Agent, listeners: dict[Door, listen.Listener], acceptors: dict[Door, Acceptor]
    ) -> None:
        """Try again until every socket is open; only an agent that adopted weights comes here."""
        while len(listeners) < len(Door):
            await asyncio.sleep(REOPEN_SECONDS)
            with contextlib.suppress(WeightcacheError):
                self._open_missing(listeners)
            for door in listeners.keys() - acceptors.keys():
                acceptors[door] = Acceptor(agent, listeners[door].sock, door)
                acceptors[door].start()
                log.info("serving at %s", listeners[door].path)


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
