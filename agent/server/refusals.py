"""The latest engines that asked for weights and did not get them: most of them load from disk now."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

from weightcache.errors import Mismatch
from weightcache.protocol import Refusal
from weightcache.server import peers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.errors import WeightcacheError
    from weightcache.protocol import Attach
    from weightcache.server.peers import Peer

KEPT = 5
_LONGEST_VALUE = 100
_LONGEST_MESSAGE = 500


class Refusals:
    """The last KEPT refusals, short enough for all of them to travel with every status."""

    def __init__(self) -> None:
        self._kept: collections.deque[Refusal] = collections.deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Refusal]:
        return iter(self._kept)

    def note(self, peer: Peer, request: Attach, error: WeightcacheError) -> None:
        """Remember that ``peer`` was told ``error``. One engine that asks again and again is one entry."""
        differences = error.differences if isinstance(error, Mismatch) else ()
        refusal = Refusal(
            at=time.time(),
            pid=peer.pid,
            uid=peer.uid,
            unit=peers.unit_of(peer.pid),
            command=peers.command_of(peer.pid),
            role=request.role[:40],
            code=error.code,
            message=error.message[:_LONGEST_MESSAGE],
            differences=tuple(difference.clipped(_LONGEST_VALUE) for difference in differences),
        )
        for known in [k for k in self._kept if (k.pid, k.role) == (refusal.pid, refusal.role)]:
            self._kept.remove(known)
        self._kept.append(refusal)
