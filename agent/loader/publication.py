"""Hand a packed set to the rank's agent, and say how far a load has come."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import ProtocolError, WeightcacheError
from weightcache.fingerprint import Fingerprint
from weightcache.loader import reasons
from weightcache.manifest import Manifest, encode
from weightcache.memory import MAX_ARENAS, memfd
from weightcache.protocol import LoadProgress, SetInfo

ACKNOWLEDGE_SECONDS = 120.0
BEGIN_SECONDS = 60.0
"""The agent may drop an earlier set first, after its engines had time to say that they use it."""
PROGRESS_SECONDS = 0.25


class Publication:
    """One publication on one agent's publish socket: begin, progress, publish each set, commit."""

    def __init__(self, path: Path | str, *, source: str, group: str, token: str) -> None:
        """Connect and begin. Raises AgentUnavailable, PermissionRefused."""
        self.conversation = Conversation(path)
        self.sets = 0
        self.holds = False
        """Whether the agent holds weights that this rank could go on with."""
        self.in_use = ""
        """Why these must not be replaced, if that is so."""
        self._started = time.monotonic()
        self._reported = 0.0
        try:
            begun = self._ask(protocol.Begin(source, group, token))
        except BaseException:
            self.conversation.close()
            raise

        self.holds, self.in_use = begun.holds, begun.in_use

    def progress(self, phase: str, done: int = 0, total: int = 0, *, force: bool = False) -> None:
        """Tell the agent; at most four times a second unless ``force``. A lost report never ends a load."""
        now = time.monotonic()
        if not force and now - self._reported < PROGRESS_SECONDS:
            return
        self._reported = now
        try:
            self.conversation.send(
                protocol.Progress(LoadProgress(phase, done, total, round(now - self._started, 3))), timeout=1.0
            )
        except WeightcacheError:
            return

    def publish(self, info: SetInfo, manifest: Manifest, arenas: Sequence[int], contents: tuple[str, ...] = ()) -> str:
        """Hand over one set; ``arenas`` are descriptors that stay the caller's. Returns the set's id.

        ``contents`` are those of all ranks of the launch, in their order.
        """
        fd = memfd.sealed("weightcache-manifest", encode(manifest))
        try:
            self.conversation.send(protocol.Publish(info, contents), (fd, *arenas))
        finally:
            os.close(fd)
        answer, _ = self.conversation.receive(ACKNOWLEDGE_SECONDS)
        if not isinstance(answer, protocol.Published):
            raise WeightcacheError(f"the agent answered {type(answer).__name__} to a publication")
        self.sets += 1
        return answer.set_id

    def commit(self) -> tuple[str, ...]:
        """Make all published sets visible and wait until the agent says that they are safe."""
        return self.conversation.request(protocol.Commit(self.sets), protocol.Committed, ACKNOWLEDGE_SECONDS).set_ids

    def borrow(self, role: str, fingerprint: Fingerprint) -> tuple[protocol.Lent, tuple[int, ...]]:
        """What the agent holds, with its descriptors, which become the caller's. Raises Empty or Mismatch."""
        self.conversation.send(protocol.Borrow(role, fingerprint))
        answer, fds = self.conversation.receive(ACKNOWLEDGE_SECONDS, 1 + MAX_ARENAS)
        if not isinstance(answer, protocol.Lent) or len(fds) != 1 + len(answer.arenas):
            transport.close_all(fds)
            raise ProtocolError(f"the agent answered {type(answer).__name__} with {len(fds)} descriptors")
        return answer, fds

    def rejoin(self, group: str, role: str, content: str) -> None:
        """This rank is about to load what it lost of ``group``. Raises InUse."""
        self._ask(protocol.Rejoin(group, role, content))

    def anew(self) -> None:
        """All ranks load anew, under the launch's own name. Raises InUse."""
        self._ask(protocol.Anew())
        self.holds = False

    def retain(self, group: str) -> tuple[str, ...]:
        """Go on with what the agent holds of ``group``, and publish nothing."""
        return self.conversation.request(protocol.Retain(group), protocol.Committed, ACKNOWLEDGE_SECONDS).set_ids

    def _ask(self, request: protocol.Message) -> protocol.Accepted:
        return self.conversation.request(request, protocol.Accepted, BEGIN_SECONDS)

    def abort(self, error: WeightcacheError) -> None:
        """Say why nothing will come: in a launch of several ranks the cause, which may be another rank's."""
        error = reasons.settled(error)
        try:
            self.conversation.send(protocol.Abort(error.code, error.message), timeout=1.0)
        except WeightcacheError:
            return
        finally:
            self.close()

    def close(self) -> None:
        """End the publication."""
        self.conversation.close()
