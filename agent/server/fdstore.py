"""The service manager as second holder of every set: its descriptor store outlives this process (systemd.service(5)).

A set of N arenas is N + 2 descriptors, stored under ``ID.record`` (a sealed memfd: what the agent knows of the set),
``ID.0`` (the manifest) and ``ID.1`` to ``ID.N``. The store says nothing when it refuses one. So a *canary* is stored
last: the write end of a pipe. If the pipe hangs up, the manager does not hold it, and then nothing is certain. It stays
there as a tripwire: a daemon-reload that empties the store is noticed at once, and everything is stored again.

The agent may be killed between any two messages. Their order tells the next one what was going on (see ``adopt``).
Memory (manifest and arenas) without its record means a commit that nobody was told of:

- a commit is stored: the memory of all its sets, then all records
- it is taken back: all records, then the memory; the first message undoes it as a whole
- one set is evicted: its memory, then its record; no other set is concerned
- sets are stored again: set by set, the record and then the memory; no other set is concerned

What no order prevents: where the manager itself drops a part (a reload that empties the store, or changes its limit)
and the agent is killed before it has stored that again, half of a commit that was being stored may be adopted, or a
set be given up because only the memory of its companion is left.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.errors import StoreRejected, WeightcacheError
from weightcache.memory import memfd
from weightcache.server import notify
from weightcache.server.journal import event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightcache.server.notify import Manager
    from weightcache.server.sets import Complete

log = logging.getLogger("weightcache")

RECORD = "record"
CANARY = "canary."
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 30.0
ATTEMPTS = 5
REFUSAL_SECONDS = 0.1
"""How long a hang-up may come behind the refusal that it tells of."""

PROBE_SECONDS = 30.0
"""How long a loss may go unnoticed that left the canary where it is."""

SPARE = 2
"""Descriptors beside the sets': the canary and its successor."""


class _Planted(enum.Enum):
    HOLDS = enum.auto()
    REJECTED = enum.auto()
    EMPTIED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is stored of one set. ``record`` is the store's own descriptor, ``fds`` are the set's."""

    record: int
    fds: tuple[int, ...]


class FdStore:
    """Keeps sets in the manager's store. One operation at a time."""

    def __init__(self, manager: Manager) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called whenever ``kept`` may have changed."""
        self._manager = manager
        self._entries: dict[str, _Entry] = {}
        self._canary: tuple[str, int] | None = None
        self._stale: list[str] = []
        """Names to remove. They stay here until the manager takes the message, however often that fails."""
        self._emptied = False
        self._holding = True
        self._lock = asyncio.Lock()
        self._refilling: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def kept(self) -> str:
        """``store``, or ``lost`` while the manager does not hold everything."""
        return "store" if self._holding else "lost"

    async def adopt(self, sets: Iterable[tuple[Complete, int]], leftovers: Iterable[str]) -> None:
        """Go on with what an earlier agent stored, and remove what is of no use.

        ``sets`` are sets with the descriptors of their records, which become the store's.
        """
        for complete, record_fd in sets:
            self._entries[complete.record.id] = _Entry(record_fd, complete.fds)
        try:
            async with self._lock:
                self._stale += leftovers
                planted = await self._plant()
        except (WeightcacheError, OSError) as error:  # no reason to end: what was adopted can be given out
            log.warning("the descriptor store does not answer: %s", error)
            planted = _Planted.REJECTED
        if planted is not _Planted.HOLDS:
            self._lost()
        self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def keep(self, sets: Sequence[Complete]) -> None:
        """Store the sets of one commit. Raises StoreRejected where the manager has no room; nothing of them stays."""
        async with self._lock:
            needed = SPARE + sum(len(complete.fds) + 1 for complete in sets)
            needed += sum(len(entry.fds) + 1 for entry in self._entries.values())
            limit = self._manager.limit
            if limit is not None and needed > limit:
                raise _rejected(f"it keeps {limit} and {needed} are needed")
            try:
                await self._tidy()  # what is to go must not take the room of what comes
                if not await self._guarded():
                    raise _rejected(f"{needed} are needed")
                new = [complete.record.id for complete in sets]
                for complete in sets:
                    self._entries[complete.record.id] = _entry(complete)
                await self._store_commit(new)
                if not await self._secure(new):
                    raise _rejected(f"{needed} are needed")
            except BaseException:
                self._take_back(sets)
                await self._tidy()
                raise

    async def take_back(self, sets: Sequence[Complete]) -> None:
        """Remove all sets of a commit that was kept for nothing, as ``forget`` does; a successor finds all or none."""
        async with self._lock:
            self._take_back(sets)
            await self._let_go()

    async def forget(self, set_id: str) -> None:
        """Remove a set, and return when the manager has let go of it: the last close is then this process's."""
        async with self._lock:
            memory, record = self._discard(set_id)
            self._stale += memory + record
            await self._let_go()

    async def close(self) -> None:
        """End the watch; the store keeps what it has."""
        for task in (self._probing, self._refilling):
            if task:
                task.cancel()
                await asyncio.wait({task})
        self._unwatch()
        while self._entries:
            os.close(self._entries.popitem()[1].record)

    # ------------------------------------------------------------------------------------------------------------------

    async def _store_memory(self, set_id: str) -> None:
        for number, fd in enumerate(self._entries[set_id].fds):
            await self._manager.store(f"{set_id}.{number}", fd)

    async def _store_record(self, set_id: str) -> None:
        await self._manager.store(f"{set_id}.{RECORD}", self._entries[set_id].record)

    async def _store_commit(self, new: Sequence[str]) -> None:
        for set_id in new:
            await self._store_memory(set_id)
        for set_id in new:
            await self._store_record(set_id)

    def _discard(self, set_id: str) -> tuple[list[str], list[str]]:
        """Own a set no more; returns the names of its memory and of its record in the store."""
        entry = self._entries.pop(set_id, None)
        if entry is None:
            return [], []
        os.close(entry.record)
        return [f"{set_id}.{number}" for number in range(len(entry.fds))], [f"{set_id}.{RECORD}"]

    def _take_back(self, sets: Sequence[Complete]) -> None:
        gone = [self._discard(complete.record.id) for complete in sets]
        self._stale += [name for _, record in gone for name in record]
        self._stale += [name for memory, _ in gone for name in memory]

    async def _let_go(self) -> None:
        if self._stale:
            await self._tidy()
            await self._manager.barrier()

    async def _tidy(self) -> None:
        while self._stale:
            await self._manager.remove(self._stale[0])
            del self._stale[0]

    async def _guarded(self) -> bool:
        """See that there is a canary, or nobody would tell of a store that is emptied while something is stored."""
        for _ in range(ATTEMPTS):
            if self._canary is not None:
                return True
            if await self._plant() is _Planted.REJECTED:
                break
        return self._canary is not None

    async def _store_all(self) -> bool:
        """Store everything again (what is still there is recognized and not stored twice); whether all is held."""
        await self._store_again()
        return await self._secure()

    async def _store_again(self, new: Sequence[str] = ()) -> None:
        # Nobody knows of the ``new`` ones yet: they begin anew, or their records would be there before their memory.
        self._stale += [f"{set_id}.{RECORD}" for set_id in new]
        await self._tidy()
        for set_id in self._entries:
            if set_id not in new:
                await self._store_record(set_id)
                await self._store_memory(set_id)
        await self._store_commit(new)

    async def _secure(self, new: Sequence[str] = ()) -> bool:
        """Plant a canary, and store everything again if the store was emptied meanwhile; whether all is held.

        ``new`` are the sets of a commit that is being stored.
        """
        for _ in range(ATTEMPTS):
            if (planted := await self._plant()) is not _Planted.EMPTIED:
                return planted is _Planted.HOLDS
            if self._canary is None:  # what is stored now would be unguarded
                continue
            await self._store_again(new)
        return False

    async def _plant(self) -> _Planted:
        """Store a new canary behind everything sent so far, and see what became of it and of the one before."""
        await self._tidy()
        name = CANARY + secrets.token_hex(4)
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            try:
                await self._manager.store(name, writer)
            finally:
                os.close(writer)
            await self._manager.barrier()
            # systemd 254 and later, which say their limit, close what they refuse in a helper, maybe after the barrier.
            held = not await notify.hangs_up(reader, 0.0 if self._manager.limit is None else REFUSAL_SECONDS)
        except BaseException:
            os.close(reader)
            self._stale.append(name)  # it may still arrive
            raise
        emptied = self._emptied or (self._canary is not None and notify.hung_up(self._canary[1]))
        self._emptied = emptied and not held  # known until all is stored again behind a canary
        if held or emptied:
            self._unwatch()
        if held:
            self._canary = name, reader
            asyncio.get_running_loop().add_reader(reader, self._trip)
        else:
            os.close(reader)
        if emptied:
            self._lost()  # whatever becomes of the caller: all is stored again
        await self._tidy()
        if emptied or self._emptied:
            return _Planted.EMPTIED
        return _Planted.HOLDS if held else _Planted.REJECTED

    def _unwatch(self) -> None:
        """Turn away from the canary; it is of no use any more, if it is still there."""
        if self._canary is not None:
            name, reader = self._canary
            self._canary = None
            self._stale.append(name)
            asyncio.get_running_loop().remove_reader(reader)
            os.close(reader)

    def _trip(self) -> None:
        """The canary is gone from the store, and surely not alone."""
        self._unwatch()
        self._emptied = True
        self._lost()

    def _lost(self) -> None:
        if self._holding:
            log.error(
                "the service manager does not hold the descriptors (was FileDescriptorStoreMax= changed?)",
                extra=event("store-emptied"),
            )
        self._holding = False
        self.changed()
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.get_running_loop().create_task(self._refill())

    async def _probe(self) -> None:
        """Store everything again from time to time, and see whether it is held.

        A daemon-reload with a smaller limit drops what is oldest, and keeps the canary.
        """
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                async with self._lock:
                    held = await self._store_all()
            except (WeightcacheError, OSError) as error:
                log.warning("cannot ask the descriptor store: %s", error)
                continue
            if not held:
                self._lost()

    async def _refill(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while not await self._fill():
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)
        log.info("the service manager holds all descriptors again", extra=event("store-refilled"))
        self._holding = True
        self.changed()

    async def _fill(self) -> bool:
        try:
            async with self._lock:
                return await self._guarded() and await self._store_all()
        except (WeightcacheError, OSError) as error:
            log.warning("cannot fill the descriptor store: %s", error)
            return False


def _entry(complete: Complete) -> _Entry:
    text = json.dumps(records.to_plain(complete.record)).encode()
    return _Entry(memfd.sealed("weightcache-record", text), complete.fds)


def _rejected(why: str) -> StoreRejected:
    return StoreRejected(
        f"the service manager does not keep all descriptors ({why}): raise FileDescriptorStoreMax= in a drop-in of "
        "this unit, run systemctl daemon-reload and restart the unit (which keeps what it holds)"
    )
