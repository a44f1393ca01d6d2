"""One weight set in the making, by a loader or by a donating engine: visible as a whole at commit, or not at all."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from weightcache.protocol import ErrorInfo, LoadProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightcache.server.connection import Connection
    from weightcache.server.leases import Lease
    from weightcache.server.peers import Peer
    from weightcache.server.sets import ResidentSet, Staged


@dataclass(slots=True, eq=False)
class Holder:
    """A donor's attach connection: it holds the invitation, and becomes the donor's lease on its own set."""

    role: str
    peer: Peer
    lease: Lease | None = None


class Production:
    """The current load. ``alive_at`` is when it last showed a sign of life (time.monotonic()).

    ``left`` is set when the publisher has had its say, ``ended`` when the outcome is decided.
    """

    def __init__(
        self, source: Literal["loader", "donor"], group: str, dispose: Callable[[Sequence[int]], None]
    ) -> None:
        self.source = source
        self.group = group
        self.published_as = group
        """The group that the sets belong to; a publisher may know better than whoever asked for the load."""
        self.named = group
        """The launch's own name, by its publisher."""
        self.token = secrets.token_hex(16)
        self.started = time.monotonic()
        self.alive_at = self.started
        self.progress = LoadProgress("importing" if source == "loader" else "donor", 0, 0, 0.0)
        self.changes = 0
        self.staged: list[Staged] = []
        self.holders: list[Holder] = []
        self.publisher: Connection | None = None
        self.claimed = False
        self.joined = asyncio.Event()
        """Set when all ranks that load together take part (for a leader), or when this one does (for the others)."""
        self.members: set[int] = set()
        """The other ranks that take part, for a leader."""
        self.asked = False
        """Whether somebody asked for exactly this, and not only for weights."""
        self.again = False
        """Whether everything is to be loaded anew, whatever ranks hold."""
        self.retained: tuple[ResidentSet, ...] = ()
        """What this rank goes on with where the launch brings back what other ranks lost."""
        self.rejoining: dict[str, str] = {}
        """What this rank's sets have to hold, by role, to belong to the group that it lost them of."""
        self.committed = False
        self.error: ErrorInfo | None = None
        self._dispose = dispose
        self.left = asyncio.Event()
        self.ended = asyncio.Event()

    def admits(self, token: str) -> bool:
        """Whether ``token`` belongs to this load; compared in constant time."""
        return hmac.compare_digest(self.token.encode(), token.encode("utf-8", "replace"))

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.started

    def now(self) -> LoadProgress:
        """The latest progress, with the seconds counted here."""
        return replace(self.progress, seconds=round(self.seconds, 1))

    def advance(self, progress: LoadProgress) -> None:
        """Take over what the publisher reports; only a change counts as a sign of life."""
        reported = replace(progress, seconds=0.0)
        if reported != self.progress:
            self.progress = reported
            self.changes += 1

    def leave(self, error: ErrorInfo | None) -> None:
        """The publisher is done; without a commit before, what it handed over is given up at once."""
        self.error = self.error or error
        self.discard()
        self.left.set()

    def discard(self) -> None:
        """Give up everything that was handed over and never committed."""
        staged, self.staged = self.staged, []
        for item in staged:
            self._dispose(item.fds)

    def end(self) -> None:
        """The outcome is decided: wake all who wait for it, and let go of the publisher."""
        self.discard()
        self.left.set()
        self.ended.set()
        if self.publisher is not None and not self.committed:
            self.publisher.hang_up()
