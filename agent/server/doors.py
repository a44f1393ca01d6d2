"""The three sockets of a rank, and who serves them. The public one may be handed in; the others are bound here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError
from weightcache.paths import own_directory
from weightcache.server import listen
from weightcache.server.acceptor import Acceptor
from weightcache.server.connection import Door

if TYPE_CHECKING:
    import socket

    from weightcache.server.app import Agent
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

REOPEN_SECONDS = 5.0


class Doors:
    """Opens, serves and closes the sockets of one agent."""

    def __init__(self, settings: Settings, handed: socket.socket | None, must: bool) -> None:
        """Open all. Raises WeightcacheError; an agent that holds weights (not ``must``) goes on with what it has."""
        self._settings = settings
        self._listeners: dict[Door, listen.Listener] = {}
        self._acceptors: dict[Door, Acceptor] = {}
        self._reopening: asyncio.Task[None] | None = None
        # Before anything is accepted: whoever waits already is the reason why this agent was started.
        self.activated = handed is not None and listen.pending(handed)
        if handed is not None:
            self._listeners[Door.PUBLIC] = listen.Listener(handed, Path(handed.getsockname()))
        try:
            self._open()
        except WeightcacheError as error:
            if must or not self._listeners:
                for listener in self._listeners.values():
                    listener.close()
                raise
            log.error("%s; serving on without", error.message)  # noqa: TRY400 - a sentence, no traceback

    def _open(self) -> None:
        settings = self._settings
        own_directory(settings.paths.directory)
        publish_gid = settings.gid if settings.publish_gid is None else settings.publish_gid
        publish_mode = 0o600 if settings.publish_gid is None and not settings.config.policy.publishers else 0o660
        for door, path, mode, gid in (
            (Door.PUBLIC, settings.public, 0o660, settings.gid),
            (Door.PUBLISH, settings.paths.publish, publish_mode, publish_gid),
            (Door.STATUS, settings.paths.status, 0o660, settings.gid),
        ):
            if door not in self._listeners:
                self._listeners[door] = listen.bind(path, mode, gid)
                if door is Door.STATUS and settings.observer is not None:
                    listen.let_in(path, settings.observer)

    def serve(self, agent: Agent) -> None:
        """Accept connections on every socket, and go on trying to open those that are missing."""
        for door in self._listeners.keys() - self._acceptors.keys():
            self._acceptors[door] = Acceptor(agent, self._listeners[door].sock, door)
            self._acceptors[door].start()
        log.info("serving at %s", self._listeners[Door.PUBLIC].path)
        if len(self._listeners) < len(Door):
            self._reopening = asyncio.get_running_loop().create_task(self._reopen(agent))

    async def _reopen(self, agent: Agent) -> None:
        await asyncio.sleep(REOPEN_SECONDS)
        with contextlib.suppress(WeightcacheError):
            self._open()
        self.serve(agent)

    @property
    def quiet(self) -> bool:
        """Whether nobody waits for an answer at the public socket."""
        return not listen.pending(self._listeners[Door.PUBLIC].sock) and not self._acceptors[Door.PUBLIC].busy

    def stop(self) -> None:
        """Accept nothing more; conversations go on."""
        if self._reopening:
            self._reopening.cancel()
        for acceptor in self._acceptors.values():
            acceptor.stop()

    async def close(self) -> None:
        """End all conversations, close the sockets and remove those that were bound here."""
        for acceptor in self._acceptors.values():
            await acceptor.close()
        for listener in self._listeners.values():
            listener.close()
