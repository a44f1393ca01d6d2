"""The agent's life: open the sockets, serve until told to stop, leave no loader and no socket behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError
from weightcache.server import listen, loads
from weightcache.server.acceptor import Acceptor
from weightcache.server.app import Agent
from weightcache.server.connection import Door
from weightcache.server.journal import event
from weightcache.server.keeper import Keeper, ProcessOnly
from weightcache.server.statusfile import StatusFile

if TYPE_CHECKING:
    import socket

    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

_THREADS = 4


class Server:
    """Serves one rank."""

    def __init__(self, settings: Settings, keeper: Keeper | None = None) -> None:
        self.settings = settings
        self.keeper = keeper or ProcessOnly()
        self._stop = asyncio.Event()

    async def serve(self, public: socket.socket | None = None) -> None:
        """Serve until SIGTERM or SIGINT. Raises WeightcacheError when the sockets cannot be had."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_THREADS, "weightcache"))
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._stop.set)
        # A handler that does nothing: SIG_IGN would be inherited by every loader.
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        listeners = self._open(public)
        agent = Agent(self.settings, self.keeper)
        status = StatusFile(agent)
        acceptors = [Acceptor(agent, listener.sock, door) for door, listener in listeners.items()]
        if agent.recover() and self.settings.load:
            self._load(agent)
        for acceptor in acceptors:
            acceptor.start()
        log.info("serving at %s", listeners[Door.PUBLIC].path)
        try:
            await self._stop.wait()
        finally:
            log.info("stopping", extra=event("stopping"))
            for acceptor in acceptors:
                acceptor.stop()
            agent.stopping = True
            await loads.cancel(agent, "the agent was stopped")
            for acceptor in acceptors:
                await acceptor.close()
            for listener in listeners.values():
                listener.close()
            status.close()
            await agent.background()

    def _open(self, public: socket.socket | None) -> dict[Door, listen.Listener]:
        settings = self.settings
        try:
            settings.paths.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise WeightcacheError(f"cannot make {settings.paths.directory}: {error.strerror}") from None
        publish_gid = settings.gid if settings.publish_gid is None else settings.publish_gid
        publish_mode = 0o600 if settings.publish_gid is None and not settings.config.policy.publishers else 0o660
        listeners = {}
        try:
            if public is None:
                listeners[Door.PUBLIC] = listen.bind(settings.public, 0o660, settings.gid)
            else:
                listeners[Door.PUBLIC] = listen.Listener(public, Path(public.getsockname()))
            listeners[Door.PUBLISH] = listen.bind(settings.paths.publish, publish_mode, publish_gid)
            listeners[Door.STATUS] = listen.bind(settings.paths.status, 0o660, settings.gid)
        except WeightcacheError:
            for listener in listeners.values():
                listener.close()
            raise
        return listeners

    def _load(self, agent: Agent) -> None:
        try:
            loads.begin(agent)
        except WeightcacheError as error:
            log.warning("nothing is loaded at start: %s", error.message)
