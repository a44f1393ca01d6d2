"""The subscription of wcache-top and the exporter: the rank's status at every change, with what happened since."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from weightcache import records
from weightcache.protocol import Happening, Observed, Watch
from weightcache.server import report
from weightcache.server.journal import Event

if TYPE_CHECKING:
    from weightcache.server.app import Agent
    from weightcache.server.connection import Connection

KEPT = 200
FIRST_EVENTS = 50
LONGEST_TEXT = 300
RESERVED = 64 * 1024
"""Bytes of a packet that are for events."""

CODED = ("refused", "verification-failed")
"""Events that mean different things with different codes."""

QUIET_SECONDS = 10.0
"""A watcher hears from an agent at least this often, so that it can tell a quiet agent from a dead one."""

LOADING_SECONDS = 0.5
SHORTEST_SECONDS = 0.1


class History(logging.Handler):
    """The latest events, as the journal gets them. ``serial`` counts all that there ever were.

    ``counts`` says how often each happened; those of CODED are counted by their code ("refused:mismatch").
    """

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._kept: collections.deque[tuple[Happening, int]] = collections.deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that is an event."""
        happened = getattr(record, "event", None)
        if isinstance(happened, Event):
            self.serial += 1
            code = f":{happened.fields['WEIGHTCACHE_CODE']}" if happened.name in CODED else ""
            self.counts[happened.name + code] += 1
            text = record.getMessage()[:LONGEST_TEXT]
            kept = Happening(self.serial, record.created, happened.name, record.levelname.lower(), text)
            self._kept.append((kept, len(json.dumps(records.to_plain(kept))) + 2))

    def since(self, serial: int) -> tuple[Happening, ...]:
        """Events after number ``serial``, oldest first: the latest ones, as many as RESERVED bytes carry."""
        chosen: list[Happening] = []
        room = RESERVED
        for item, size in reversed(self._kept):
            room -= size
            if item.serial <= serial or room < 0:
                break
            chosen.append(item)
        return tuple(reversed(chosen))


async def watch(agent: Agent, connection: Connection, request: Watch) -> None:
    """Send the status now and whenever it changes, at most once in ``request.seconds``, until the watcher leaves."""
    seen = max(agent.history.serial - FIRST_EVENTS, 0)
    pause = max(request.seconds, SHORTEST_SECONDS)
    gone: asyncio.Future[Any] = asyncio.ensure_future(connection.closed())
    try:
        while not gone.done():
            events = agent.history.since(seen)
            seen = agent.history.serial
            await connection.send(Observed(report.report(agent, RESERVED).status, events))
            changed = asyncio.ensure_future(agent.changes.wait(LOADING_SECONDS if agent.production else QUIET_SECONDS))
            # What changes during the pause is sent after it, all at once.
            await asyncio.wait({gone}, timeout=pause)
            try:
                await asyncio.wait({gone, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
