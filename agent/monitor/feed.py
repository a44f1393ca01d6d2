"""One rank's subscription: a thread that listens to the agent, and to its successor when it is restarted."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import socket
import threading
import time
from typing import TYPE_CHECKING

from weightcache.client import Conversation
from weightcache.errors import AgentUnavailable, ProtocolError, WeightcacheError
from weightcache.monitor import view
from weightcache.monitor.snapshot import RankEvent
from weightcache.monitor.view import RankView
from weightcache.protocol import Observed, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightcache.monitor.site import Site

KEPT_EVENTS = 200
QUIET_SECONDS = 10.0
"""The agent says something at least this often (weightcache.server.watch)."""

PATIENCE_SECONDS = 3 * QUIET_SECONDS
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 2.0
BREATH_SECONDS = 0.1
"""An agent says nothing more often than this; what one says all the same waits in its socket."""


class Feed:
    """What is known of one rank now. An agent that goes away is a state, not an error.

    ``changed`` is called, from the feed's thread, after each change.
    """

    def __init__(self, site: Site, rank: int, seconds: float, changed: Callable[[], None]) -> None:
        self.rank = rank
        self.answered = threading.Event()
        """Set when the first answer, or its absence, is known."""
        self._site = site
        self._seconds = seconds
        self._changed = changed
        self._lock = threading.Lock()
        self._view: RankView | None = None
        self._events: collections.deque[RankEvent] = collections.deque(maxlen=KEPT_EVENTS)
        self._agent: Conversation | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"feed-{rank}", daemon=True)
        self._thread.start()

    def pace(self, seconds: float) -> None:
        """Hear at most once in so many seconds; the subscription is renewed for it."""
        self._seconds = seconds
        self._interrupt()

    def now(self) -> tuple[RankView | None, tuple[RankEvent, ...]]:
        """The rank as last heard, None before the first answer, and its latest events, oldest first."""
        with self._lock:
            return self._view, tuple(self._events)

    def close(self) -> None:
        """End the subscription. The thread ends at once, or when it has connected in vain (view.ANSWER_SECONDS)."""
        self._closing.set()
        self._interrupt()

    def join(self, seconds: float) -> None:
        """Wait for the thread, at most ``seconds``."""
        self._thread.join(seconds)

    # ------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            before, seconds = self._view, self._seconds
            try:
                self._listen(seconds)
            except Exception as error:  # noqa: BLE001 - without this thread the last numbers would stay, as if true
                if self._closing.is_set() or self._seconds != seconds:  # interrupted
                    continue
                if self._view is not before:  # it had answered
                    delay = FIRST_RETRY_SECONDS
                self._heard(self._without_agent(self._reason(error)), ())
                self._closing.wait(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _listen(self, seconds: float) -> None:
        """Until the feed is closed or wants another pace. Raises what ended the subscription."""
        newest = 0
        with self._connected() as agent:
            agent.send(Watch(seconds), timeout=view.ANSWER_SECONDS)
            deadline = time.monotonic() + view.ANSWER_SECONDS
            while self._seconds == seconds and not self._closing.is_set():
                if not agent.readable(max(deadline - time.monotonic(), 0)):
                    raise AgentUnavailable(f"the agent at {agent.path} stopped answering")
                message, _ = agent.receive(view.ANSWER_SECONDS)
                if not isinstance(message, Observed):
                    raise ProtocolError(f"the agent at {agent.path} answered {type(message).__name__}")
                deadline = time.monotonic() + max(PATIENCE_SECONDS, 3 * seconds)
                fresh = [event for event in message.events if event.serial > newest]
                newest = max([newest, *(event.serial for event in fresh)])
                events = tuple(RankEvent(self.rank, event) for event in fresh)
                self._heard(RankView(message.status, "up", None, time.time()), events)
                self._closing.wait(BREATH_SECONDS)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Conversation]:
        """A connection to the agent that ``_interrupt`` ends."""
        with Conversation(self._site.rank(self.rank).status, view.ANSWER_SECONDS) as agent:
            with self._lock:
                self._agent = agent
            try:
                yield agent
            finally:
                with self._lock:
                    self._agent = None

    def _interrupt(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._agent is not None:
                self._agent.sock.shutdown(socket.SHUT_RDWR)

    def _reason(self, error: Exception) -> WeightcacheError:
        if isinstance(error, WeightcacheError):
            return error
        return AgentUnavailable(f"rank {self.rank} cannot be observed ({type(error).__name__}: {error})")

    def _without_agent(self, error: WeightcacheError) -> RankView:
        found = view.unanswered(self._site, self.rank, error)
        if self._view is None or _is_later(found, self._view):
            return found
        # An agent that crashed said more to its subscribers than to its file.
        return dataclasses.replace(found, status=self._view.status, heard_at=self._view.heard_at)

    def _heard(self, found: RankView, events: tuple[RankEvent, ...]) -> None:
        with self._lock:
            self._view = found
            # A new subscription begins with events that may be known already.
            known = {(event.happened.at, event.happened.serial) for event in self._events}
            self._events += (event for event in events if (event.happened.at, event.happened.serial) not in known)
        self.answered.set()
        self._changed()


def _is_later(left: RankView, heard: RankView) -> bool:
    """Whether what an agent left behind is newer than what was heard.

    Within one agent's life the agent says it, as the host's clock may have been set back since.
    """
    if left.status.pid == heard.status.pid:
        return left.status.state == "stopped" or left.status.uptime_seconds >= heard.status.uptime_seconds
    return left.heard_at >= heard.heard_at
