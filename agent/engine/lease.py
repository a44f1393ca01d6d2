"""Keep a lease while the engine lives: an open connection, renewed when the agent comes back after a crash.

The engine never depends on the agent: its mapping keeps the memory. The lease tells the agent, and through it the
operator, who still uses a set.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import WeightcacheError
from weightcache.paths import RankPaths

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 1.0


class Lease:
    """Watches one lease connection in a daemon thread."""

    def __init__(self, socket_path: Path, set_id: str, role: str, conversation: Conversation) -> None:
        """Take over ``conversation`` (the attach connection). ``socket_path`` is the rank's public socket."""
        self.status_path = RankPaths(socket_path.parent, int(socket_path.name.partition(".")[0])).status
        self.set_id = set_id
        self.role = role
        self._conversation = conversation
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"weightcache-lease-{role}", daemon=True)
        self._thread.start()

    def fault(self, reason: str) -> None:
        """Tell the agent that the device failed. Best effort: this process is about to end."""
        with contextlib.suppress(OSError, WeightcacheError):
            self._conversation.send(protocol.Faulted(reason), timeout=1.0)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._wait_for_end()
            self._conversation.close()
            if self._stop.is_set():
                return
            logger.warning("weightcache: the agent went away; this engine goes on with its weights")
            self._renew()
        self._conversation.close()

    def _wait_for_end(self) -> None:
        self._conversation.sock.settimeout(None)  # a lease lasts as long as the engine
        try:
            while transport.receive_packet(self._conversation.sock).data:
                continue
        except (OSError, WeightcacheError):
            return

    def _renew(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while not self._stop.wait(delay):
            delay = min(delay * 2, LAST_RETRY_SECONDS)
            try:
                # Only the status socket: renewing must never start an agent that an operator stopped.
                conversation = Conversation(self.status_path)
                try:
                    answer = conversation.request(protocol.Renew(self.set_id, self.role), protocol.Renewed)
                except BaseException:
                    conversation.close()
                    raise
            except WeightcacheError:
                continue
            self._conversation = conversation
            state = "" if answer.resident else " (it no longer holds this set; this engine keeps it alive)"
            logger.warning("weightcache: renewed the lease with the agent%s", state)
            return
