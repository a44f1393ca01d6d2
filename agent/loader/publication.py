"""Hand a packed set to the rank's agent, and say how far a load has come."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from weightcache import protocol
from weightcache.client import Conversation
from weightcache.errors import WeightcacheError
from weightcache.loader import reasons
from weightcache.manifest import Manifest, encode
from weightcache.memory import memfd
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
        self._started = time.monotonic()
        self._reported = 0.0
        try:
            self.conversation.request(protocol.Begin(source, group, token), protocol.Accepted, BEGIN_SECONDS)
        except BaseException:
            self.conversation.close()
            raise

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

    def publish(self, info: SetInfo, manifest: Manifest, arenas: Sequence[int]) -> str:
        """Hand over one set; ``arenas`` are descriptors that stay the caller's. Returns the set's id."""
        fd = memfd.sealed("weightcache-manifest", encode(manifest))
        try:
            self.conversation.send(protocol.Publish(info), (fd, *arenas))
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
