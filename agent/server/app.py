"""One rank: what it holds, what it is making, who uses it. No sockets and no processes in here."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weightcache.errors import DamagedSet, WeightcacheError
from weightcache.protocol import DrainInfo, ErrorInfo
from weightcache.server import leases, markers
from weightcache.server.journal import event
from weightcache.server.measures import Measures
from weightcache.server.production import Production
from weightcache.server.refusals import Refusals
from weightcache.server.sets import ADOPTED, Complete, Record, ResidentSet, Sets
from weightcache.server.states import Backoff, Facts, State, state_of
from weightcache.server.waiting import Changes
from weightcache.server.watch import History
from weightcache.transport import close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from pathlib import Path

    from weightcache.server.journal import Event
    from weightcache.server.keeper import Keeper
    from weightcache.server.leases import Lease
    from weightcache.server.peers import Peer
    from weightcache.server.settings import Settings

log = logging.getLogger("weightcache")

SETTLE_SECONDS = 10.0
"""How long engines may take to renew their leases after their agent was restarted."""

RECORD_SCHEMA = 2
"""Sets whose record has another schema are not adopted."""


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """The failed marker: why the last load failed, and when (seconds since the epoch)."""

    code: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage marker: which sets must not be given out, and why."""

    reasons: dict[str, str]


class Agent:
    """The state of one rank. All methods run on the event loop; none of them waits for a peer."""

    def __init__(self, settings: Settings, keeper: Keeper) -> None:
        self.settings = settings
        self.keeper = keeper
        self.sets = Sets()
        self.orphans: dict[str, Lease] = {}
        self.production: Production | None = None
        self.jobs: set[asyncio.Task[None]] = set()
        """Loaders that were started and are not gone."""
        self.failure: ErrorInfo | None = None
        self.backoff = Backoff()
        self.drained: DrainInfo | None = None
        self.started = time.monotonic()
        self.changes = Changes()
        self.history = History()
        self.measures = Measures()
        self.refusals = Refusals()
        self.observers: list[Callable[[], None]] = []
        self.need: Callable[[float], None] = lambda _: None
        """Tells whoever waits for the end of this start that it goes on for up to so many seconds from now."""
        self.verifying = asyncio.Lock()
        self.leaving: WeightcacheError | None = None
        """Why nothing is given out or loaded any more: the agent is about to end."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._optional: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._announced: State | None = None

    def recover(self) -> bool:
        """Read the markers that an earlier agent left; False if the configured model should not be loaded by itself."""
        unknown = FailedLoad("load-failed", "an earlier load failed", time.time())
        if failed := markers.read(self.settings.paths.failed_marker, FailedLoad, unknown):
            self.failure = ErrorInfo(failed.code, failed.message)
        self.drained = markers.read(self.settings.paths.drain_marker, DrainInfo, DrainInfo(0, time.time()))
        self.touch()
        return not (failed or self.drained)

    @property
    def settling(self) -> float:
        """Seconds until everybody who uses an adopted set has renewed its lease; 0 where nothing was adopted."""
        adopted = any(resident.adopted for resident in self.sets)
        return max(self.started + SETTLE_SECONDS - time.monotonic(), 0.0) if adopted else 0.0

    @property
    def backend(self) -> str:
        """The kind of memory: of what is resident, or else what is configured."""
        newest = self.sets.newest("target")
        return newest.record.backend if newest else self.settings.config.memory.backend

    @property
    def gpu(self) -> str:
        """The UUID of the GPU that holds what is resident, or else of the configured one."""
        newest = self.sets.newest("target")
        return newest.record.gpu if newest else self.settings.gpu

    @property
    def error(self) -> ErrorInfo | None:
        """What is wrong: damaged weights, or the configuration, or else the last load."""
        for resident in self.sets:
            if resident.damage:
                return ErrorInfo(DamagedSet.code, resident.damage)
        return self.settings.error or self.failure

    @property
    def state(self) -> State:
        """What the rank is doing now."""
        return state_of(
            Facts(
                drained=self.drained is not None,
                damaged=any(s.damage for s in self.sets),
                loading=self.production is not None,
                resident=self.sets.newest("target") is not None,  # drafts alone serve nobody
                failed=self.error is not None,
            )
        )

    def touch(self) -> None:
        """Something changed: tell whoever waits or watches, and log the state once per change."""
        state = self.state
        if state is not self._announced:
            reason = self.error if state in (State.FAILED, State.DEGRADED) else None
            change = event("state-changed", state=state, previous=self._announced or "")
            log.info("state %s%s", state, f": {reason.message}" if reason else "", extra=change)
            self._announced = state
        self.changes.notify()
        for observer in self.observers:
            observer()

    def spawn(self, work: Coroutine[Any, Any, None], optional: bool = False) -> asyncio.Task[None]:
        """Run ``work`` beside everything else; kept referenced until it is done. A stop gives up what is optional."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if optional:
            self._optional.add(task)
            task.add_done_callback(self._optional.discard)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("internal error in the background", exc_info=error)

    async def background(self) -> None:
        """Wait for everything that was spawned, and give up what is optional."""
        for task in self._optional:
            task.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- making sets ---------------------------------------------------------------------------------------------------

    def start(self, source: Literal["loader", "donor"], group: str) -> Production:
        """Begin a load, where none is under way."""
        self.production = Production(source, group, self.dispose)
        log.info("load begins (%s)", source, extra=event("load-began", source=source))
        self.touch()
        return self.production

    def complete(self, production: Production) -> tuple[Complete, ...]:
        """Take all sets of a load out of it, with their records: from now on they are one commit, or nothing."""
        staged, production.staged = production.staged, []
        memory, now = self.settings.config.memory, time.time()
        companions = tuple(item.id for item in staged)
        return tuple(
            Complete(
                Record(
                    schema=RECORD_SCHEMA,
                    id=item.id,
                    version=self.sets.next_version(item.info.role),
                    source=production.source,
                    published_at=now,
                    backend=memory.backend,
                    gpu=self.settings.gpu,
                    companions=companions,
                    group=production.published_as,
                    info=item.info,
                    contents=item.contents,
                    configuration=self.settings.kinship if item.contents else "",
                ),
                item.fds,
            )
            for item in staged
        )

    async def abandon(self, sets: Sequence[Complete]) -> None:
        """Give up the sets of a load that were never committed."""
        try:
            await self.keeper.take_back(sets)
        except WeightcacheError as error:
            names = ", ".join(complete.record.id for complete in sets)
            log.warning("sets %s may stay in the descriptor store: %s", names, error.message)
        finally:
            await asyncio.to_thread(close_all, [fd for complete in sets for fd in complete.fds])

    def adopt(self, sets: Iterable[Complete]) -> None:
        """Take over what an earlier agent published, as it was."""
        known = markers.read(self.settings.paths.damage_marker, Damage, Damage({})) or Damage({})
        for complete in sets:
            made = self.sets.add(complete)
            made.adopted = True
            if reason := known.reasons.get(made.id):
                made.damage = reason
            elif self.settings.config.policy.verify_adopted == "before-ready" and self.settings.config.loader.command:
                made.doubts.append(ADOPTED)
            log.info(
                "set %s %s version %d adopted: %d bytes in %d arenas",
                made.id,
                made.info.role,
                made.version,
                made.bytes,
                len(made.info.arenas),
                extra=event("set-adopted", **_of_set(made)),
            )

    def commit(self, production: Production, sets: Sequence[Complete]) -> list[ResidentSet]:
        """Make all sets of a load visible together, and turn its donor's connections into leases."""
        made = [self.sets.add(complete) for complete in sets]
        production.committed = True
        for holder in production.holders:
            for resident in made:
                if resident.info.role == holder.role:
                    holder.lease = self.lease(resident, holder.peer)
        for resident in made:
            log.info(
                "set %s %s version %d published by %s: %d bytes in %d arenas after %.1f s",
                resident.id,
                resident.info.role,
                resident.version,
                production.source,
                resident.bytes,
                len(resident.info.arenas),
                production.seconds,
                extra=event(
                    "set-published", source=production.source, seconds=round(production.seconds, 3), **_of_set(resident)
                ),
            )
        self._loaded(production, "published")
        return made

    def retain(self, production: Production) -> None:
        """End a load with what was resident before: other ranks have loaded what they had lost."""
        production.committed = True
        ended = event("load-ended", source=production.source, code="", seconds=round(production.seconds, 3))
        what = "load ended after %.1f s: this rank goes on with what it holds, other ranks loaded what they had lost"
        log.info(what, production.seconds, extra=ended)
        self._loaded(production, "retained")

    def _loaded(self, production: Production, result: Literal["published", "retained"]) -> None:
        self.production, self.failure, self.backoff = None, None, Backoff()
        self.forget_failure()
        self.measures.load_ended(production, result)
        production.end()
        self.settle()

    def give_up(self, production: Production, error: ErrorInfo | None, failed: bool = True) -> None:
        """End a load without a set: if it ``failed``, later tries are spaced out and a restart tries nothing."""
        if self.production is not production:
            return
        self.production = None
        if failed and error is not None:
            production.error = self.failure = error
            self.backoff = self.backoff.after_failure(time.monotonic())
            self._remember(error)
        self.measures.load_ended(production, "failed" if failed else "given-up")
        code, why = (error.code, error.message) if error else ("", "given up")
        ended = event("load-ended", source=production.source, code=code, seconds=round(production.seconds, 3))
        log.info("load ended without a set after %.1f s: %s", production.seconds, why, extra=ended)
        production.end()
        self.touch()

    def give_in(self, error: WeightcacheError) -> None:
        """The agent ends because of ``error``: everybody who still asks is told, and the next agent loads nothing."""
        self.leaving = error
        self._remember(ErrorInfo(error.code, error.message))

    def _remember(self, error: ErrorInfo) -> None:
        try:
            markers.write(self.settings.paths.failed_marker, FailedLoad(error.code, error.message, time.time()))
        except OSError as problem:
            log.warning("cannot write %s: %s", self.settings.paths.failed_marker, problem)

    def forget_failure(self) -> None:
        """A load succeeded, or somebody asked for a new one."""
        _remove(self.settings.paths.failed_marker)

    def condemn(self, resident: ResidentSet, reason: str) -> None:
        """Give a set out no more, also not after a restart."""
        if self.sets.get(resident.id) is not resident:  # dropped meanwhile
            return
        resident.damage = reason
        self._remember_damage()
        self.touch()

    def _remember_damage(self) -> None:
        marker = self.settings.paths.damage_marker
        reasons = {resident.id: resident.damage for resident in self.sets if resident.damage}
        try:
            if reasons:
                markers.write(marker, Damage(reasons))
            else:
                markers.remove(marker)
        except OSError as problem:
            log.warning("cannot change %s: %s", marker, problem)

    def dispose(self, fds: Sequence[int]) -> None:
        """Close descriptors in a thread: the last close of device memory may take as long as the driver likes."""
        if fds:
            self.spawn(asyncio.to_thread(close_all, fds))

    # -- using sets ----------------------------------------------------------------------------------------------------

    def lease(self, resident: ResidentSet, peer: Peer) -> Lease:
        """Note that an engine uses a set from now on."""
        lease = leases.grant(peer, resident.id, resident.info.role)
        resident.leases[lease.id] = lease
        log.info("set %s leased to %s %s", resident.id, peer, lease.status.unit, extra=_of_lease("leased", lease))
        self.touch()
        return lease

    def orphan(self, set_id: str, role: str, peer: Peer) -> Lease:
        """Note that an engine uses a set that this agent does not hold."""
        lease = leases.grant(peer, set_id, role)
        self.orphans[lease.id] = lease
        log.info("%s still uses a set that is not resident any more", peer, extra=_of_lease("leased", lease))
        self.touch()
        return lease

    def end_lease(self, lease: Lease) -> None:
        """An engine is gone; a set that only waited for this is dropped."""
        self.orphans.pop(lease.id, None)
        if resident := self.sets.get(lease.set_id):
            resident.leases.pop(lease.id, None)
            self.measures.lease_ended()
        status, ended = lease.status, _of_lease("lease-ended", lease)
        log.info("lease on set %.12s ended: pid %d (uid %d)", lease.set_id, status.pid, status.uid, extra=ended)
        self.settle()

    def settle(self) -> None:
        """Drop every unleased set that nobody can get any more."""
        for resident in self.sets.unleased() if self.drained else self.sets.superseded():
            if not resident.leases:
                self.drop(resident)
        self.touch()

    async def releases(self) -> None:
        """Wait until everything that was dropped so far is closed."""
        if self._releases:
            await asyncio.wait(set(self._releases))

    def drop(self, resident: ResidentSet) -> asyncio.Task[None]:
        """Forget a set at once and close its descriptors behind; leases on it live on as orphans."""
        self.sets.remove(resident)
        self.orphans.update(resident.leases)
        dropped = event("set-dropped", set=resident.id, bytes=resident.bytes)
        log.info("set %s dropped: %d bytes", resident.id, resident.bytes, extra=dropped)
        self.touch()
        task = self.spawn(self._release(resident))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _release(self, resident: ResidentSet) -> None:
        try:
            await self.keeper.forget(resident.id)
        except WeightcacheError as error:
            log.warning("set %s may stay in the descriptor store: %s", resident.id, error.message)
        finally:
            await resident.close()
        if resident.damage:  # not before: an agent that is killed meanwhile finds the set again
            self._remember_damage()

    async def drop_all(self, chosen: Iterable[ResidentSet]) -> None:
        """Drop sets, and return when all are closed. Whoever gives up waiting stops no release."""
        if tasks := [self.drop(resident) for resident in chosen]:
            await asyncio.wait(tasks)


def _remove(marker: Path) -> None:
    try:
        markers.remove(marker)
    except OSError as problem:
        log.warning("cannot remove %s: %s", marker, problem)


def _of_set(resident: ResidentSet) -> dict[str, str | int]:
    info = resident.info
    return {
        "set": resident.id,
        "role": info.role,
        "model": info.fingerprint.model_path,
        "version": resident.version,
        "bytes": resident.bytes,
        "arenas": len(info.arenas),
    }


def _of_lease(name: Literal["leased", "lease-ended"], lease: Lease) -> dict[str, Event]:
    of = lease.status
    return event(name, set=lease.set_id, lease=lease.id, client_pid=of.pid, client_uid=of.uid, client_unit=of.unit)
