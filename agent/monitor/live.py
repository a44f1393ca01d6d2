"""The living host as a source of snapshots: one thread a rank, one for devices and processes, one for the engines.

Whoever asks for a snapshot gets what the threads found last, and never waits for an agent, a driver or an engine.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import weightcache
from weightcache.errors import AgentUnavailable
from weightcache.monitor import site as sites, view
from weightcache.monitor.feed import Feed
from weightcache.monitor.snapshot import RankEvent, Snapshot
from weightcache.monitor.standby import Standby

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightcache.monitor.host import Host
    from weightcache.monitor.site import Site
    from weightcache.monitor.view import RankView

KEPT_EVENTS = 200
SEARCH_SECONDS = 5.0
"""How often new ranks are looked for."""

CLOSE_SECONDS = 1.0


class Live:
    """Observes the ranks of ``site``: those of ``only``, or all that there are or come to be.

    ``host`` gathers what the agents cannot know; without it a snapshot has no devices and no engines.
    """

    def __init__(self, site: Site, only: int | None, seconds: float, host: Host | None) -> None:
        self.changed = threading.Event()
        """Set after each change of a rank; the reader clears it."""
        self._site = site
        self._only = only
        self._seconds = seconds
        self._host = host
        self._standby = Standby(site.engines)
        self._feeds: dict[int, Feed] = {}
        self._searched = 0.0
        self._search()

    def snapshot(self) -> Snapshot:
        """What is known now; a rank is missing until its agent, or its absence, was heard of."""
        return self._snapshot({})

    def _snapshot(self, unheard: Mapping[int, RankView]) -> Snapshot:
        if time.monotonic() - self._searched > SEARCH_SECONDS:
            self._search()
        ranks: list[RankView] = []
        events: list[RankEvent] = []
        for rank in sorted(self._feeds):
            heard, happened = self._feeds[rank].now()
            if (found := heard or unheard.get(rank)) is not None:
                ranks.append(found)
            events += happened
        events.sort(key=lambda event: event.happened.at)
        facts = self._host.now(ranks) if self._host else None
        wrong = self._site.problem or self._site.lost
        standby, unseen = self._standby.now()
        problem = wrong.message if wrong else unseen
        return Snapshot(
            at=time.time(),
            host=socket.gethostname(),
            version=weightcache.__version__,
            driver=facts.driver if facts else "",
            problem=problem or (facts.problem if facts else ""),
            ranks=tuple(ranks),
            devices=facts.devices if facts else (),
            engines=facts.engines if facts else (),
            events=tuple(events[-KEPT_EVENTS:]),
            standby=standby,
        )

    def first(self, seconds: float) -> Snapshot:
        """The first snapshot with all ranks; those whose agents say nothing within ``seconds`` are down."""
        deadline = time.monotonic() + seconds
        for feed in self._feeds.values():
            feed.answered.wait(max(deadline - time.monotonic(), 0))
        silent = AgentUnavailable(f"the agent did not answer within {seconds:g} s")
        unheard = {rank: view.unanswered(self._site, rank, silent) for rank in self._feeds}
        if self._host:
            self._host.now([self._feeds[rank].now()[0] or unheard[rank] for rank in sorted(self._feeds)])
            self._host.wait(max(deadline - time.monotonic(), 0))
        return self._snapshot(unheard)

    def pace(self, seconds: float) -> None:
        """Gather every so many seconds."""
        self._seconds = seconds
        for feed in self._feeds.values():
            feed.pace(seconds)
        if self._host:
            self._host.pace(seconds)

    def close(self) -> None:
        """End all threads; those that hang are left behind."""
        for feed in self._feeds.values():
            feed.close()
        if self._host:
            self._host.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds.values():
            feed.join(max(deadline - time.monotonic(), 0))

    def _search(self) -> None:
        self._searched = time.monotonic()
        found = sites.find_ranks(self._site) if self._only is None else [self._only]
        for rank in found:
            if rank not in self._feeds:
                self._feeds[rank] = Feed(self._site, rank, self._seconds, self.changed.set)
