"""Resident weight sets, and who owns which descriptor: a set owns its own, and nobody else closes them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightcache.protocol import SetInfo
from weightcache.transport import close_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.fingerprint import Fingerprint
    from weightcache.server.leases import Lease


ADOPTED = "an earlier agent left it"
"""The doubt about an adopted set where the policy wants it verified first."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A set that was handed over, but belongs to a load that is not complete. It owns its descriptors."""

    id: str
    info: SetInfo
    fds: tuple[int, ...]
    """The manifest, then the arenas, in order."""
    contents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """What the agent knows of a complete set, in the form in which it outlives the agent.

    ``version`` counts from 1 for each role; ``published_at`` is seconds since the epoch; ``backend`` and ``gpu`` say
    where the memory is, whatever a later configuration says; ``companions`` are the ids of all sets of the same commit;
    ``group`` names the launch that loaded them, the same on all its ranks; ``contents`` are what all of these hold in
    this role, in their order, and ``configuration`` is what their agents had in common (none where it is not known).
    """

    schema: int
    id: str
    version: int
    source: str
    published_at: float
    backend: str
    gpu: str
    companions: tuple[str, ...]
    group: str
    info: SetInfo
    contents: tuple[str, ...] = ()
    configuration: str = ""


class Complete(NamedTuple):
    """A complete set on its way: the record, and the descriptors of the manifest and the arenas, in order."""

    record: Record
    fds: tuple[int, ...]


class ResidentSet:
    """A complete set that can be attached. It owns its descriptors."""

    def __init__(self, complete: Complete) -> None:
        self.record, self._fds = complete
        self.id = self.record.id
        self.info = self.record.info
        self.version = self.record.version
        self.published_at = self.record.published_at
        self.leases: dict[str, Lease] = {}
        self.damage = ""
        self.doubts: list[str] = []
        """Why it is being examined, once for each examination that is not over; nobody gets it meanwhile."""
        self.deaths = 0
        """Engines in a row that died soon after they attached."""
        self.suspected_at = -math.inf
        """When the last of them died (time.monotonic())."""
        self.adopted = False
        """Whether an earlier agent left it."""
        self._lent = 0
        self._returned = asyncio.Event()
        self._returned.set()

    @property
    def suspect(self) -> str:
        """The first doubt, or an empty text."""
        return self.doubts[0] if self.doubts else ""

    @property
    def bytes(self) -> int:
        """Physical size of all arenas."""
        return sum(arena.bytes for arena in self.info.arenas)

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[int, ...]]:
        """The descriptors, for one send: they are not closed meanwhile, even if the set is dropped."""
        self._lent += 1
        self._returned.clear()
        try:
            yield self._fds
        finally:
            self._lent -= 1
            if not self._lent:
                self._returned.set()

    async def close(self) -> None:
        """Close the descriptors, in a thread: the last close may run the driver's release path for a long time."""
        await self._returned.wait()
        fds, self._fds = self._fds, ()
        await asyncio.to_thread(close_all, fds)


class Sets:
    """All resident sets of one rank, oldest first."""

    def __init__(self) -> None:
        self._sets: dict[str, ResidentSet] = {}
        self._versions: dict[str, int] = {}
        self._ids: set[str] = set()

    def __iter__(self) -> Iterator[ResidentSet]:
        return iter(tuple(self._sets.values()))

    def __len__(self) -> int:
        return len(self._sets)

    def new_id(self) -> str:
        """12 hex digits that this agent has not used before."""
        while (chosen := secrets.token_hex(6)) in self._ids:
            pass
        self._ids.add(chosen)
        return chosen

    def get(self, set_id: str) -> ResidentSet | None:
        """The set with this id."""
        return self._sets.get(set_id)

    def next_version(self, role: str) -> int:
        """The version of the role's next set."""
        return self._versions.get(role, 0) + 1

    def add(self, complete: Complete) -> ResidentSet:
        """Make a set visible; it takes over the descriptors."""
        record = complete.record
        self._ids.add(record.id)
        self._versions[record.info.role] = max(self._versions.get(record.info.role, 0), record.version)
        resident = self._sets[record.id] = ResidentSet(complete)
        return resident

    def remove(self, resident: ResidentSet) -> bool:
        """Make a set invisible; the caller closes it. False if it was removed before."""
        return self._sets.pop(resident.id, None) is not None

    def newest(self, role: str) -> ResidentSet | None:
        """The latest set of a role."""
        return next((s for s in reversed(self._sets.values()) if s.info.role == role), None)

    def find(self, role: str, fingerprint: Fingerprint) -> ResidentSet | None:
        """The latest set that is exactly what an engine needs."""
        for resident in reversed(self._sets.values()):
            if resident.info.role == role and resident.info.fingerprint == fingerprint:
                return resident
        return None

    def whole(self, resident: ResidentSet) -> bool:
        """Whether all sets of the load that a set came from are resident."""
        return self._sets.keys() >= set(resident.record.companions)

    def superseded(self) -> list[ResidentSet]:
        """Sets that a later one with the same role and fingerprint replaced."""
        return [s for s in self if self.find(s.info.role, s.info.fingerprint) is not s]

    def unleased(self) -> list[ResidentSet]:
        """Sets that no engine uses."""
        return [s for s in self if not s.leases]
