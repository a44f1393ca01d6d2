"""RANK.json: the last known status, for readers while the agent is down. Best effort: a full disk stops nothing.

It names processes, their users and command lines, so it is for whoever may connect to the status socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.server import markers, report
from weightcache.server.states import State

if TYPE_CHECKING:
    from weightcache.server.app import Agent

log = logging.getLogger("weightcache")

DELAY_SECONDS = 0.1


class StatusFile:
    """Writes the status shortly after a change, many changes at once."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pending: asyncio.TimerHandle | None = None
        self._complained = False
        agent.observers.append(self._changed)

    def _changed(self) -> None:
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(DELAY_SECONDS, self._write)

    def _write(self, final: bool = False) -> None:
        self._pending = None
        settings = self._agent.settings
        status = report.status(self._agent)
        if final:
            status = dataclasses.replace(
                status, state=State.STOPPED.value, sets=(), orphans=(), progress=None, uptime_seconds=0.0
            )
        try:
            text = json.dumps(records.to_plain(status), indent=1) + "\n"
            markers.replace(settings.paths.status_file, text, 0o640, settings.gid, settings.observer)
            self._complained = False
        except OSError as error:
            if not self._complained:
                log.warning("cannot write %s: %s (going on without)", settings.paths.status_file, error)
            self._complained = True

    def close(self) -> None:
        """Say that the agent is stopped, and write nothing more."""
        self._agent.observers.remove(self._changed)
        if self._pending:
            self._pending.cancel()
        self._write(final=True)
