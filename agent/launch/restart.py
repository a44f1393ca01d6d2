"""Restart mode: the launcher stays, and starts the engine again whenever it ends by itself.

Only a signal that the launcher passed on ends both. What an engine needs anew is decided anew: agents may have come or
gone. With warm workers the next engine's processes have imported SGLang already (weightcache.warm.pool).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache.errors import ConfigError, UsageError, WeightcacheError
from weightcache.launch import child, processes, proof, session, supervisor
from weightcache.launch.console import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from weightcache.launch.slot import Slot
    from weightcache.warm.pool import Pool

    Start = Callable[[], AbstractContextManager[session.Launch]]

FIRST_PAUSE = 1.0
LAST_PAUSE = 30.0
MOST_DEATHS = 5
"""Engines in a row that ended before they served."""
ATTEND_SECONDS = 1.0
PARK_AFTER = 5.0
"""The server listens before its own warm-up: let it have the processors until it has made its first answer."""
NO_PORT_SECONDS = 120.0
"""A server whose port is not known counts as serving when it has lived so long."""
SERVED_SECONDS = 30.0
"""A server that does not say when it serves has done so when it has listened for so long."""
GONE_SECONDS = 10.0
"""SGLang's processes die with their main process; those that do not by then are killed."""


class Attendant:
    """Looks after one server: whether it listens yet, what it leaves behind, and the tree parked for the next."""

    def __init__(self, port: int | None, pool: Pool | None, strays: processes.Strays) -> None:
        self._listened: float | None = None
        self._port = port
        self._pool = pool
        self._strays = strays
        self._began = time.monotonic()

    def attend(self, server: int) -> float:
        """See supervisor.Beside."""
        now = time.monotonic()
        self._strays.reap(self._own(server))
        if self._listened is None:
            if self._pool is not None:
                self._pool.look(server)
            if self._listens(server, now):
                self._listened = now
        if self._pool is not None and self.listened_for(PARK_AFTER):
            self._pool.attend()
        return ATTEND_SECONDS

    def listened_for(self, seconds: float) -> bool:
        """Whether it listens, or did, since so many seconds."""
        return self._listened is not None and time.monotonic() - self._listened >= seconds

    def clear(self) -> bool:
        """See everything of the ended server gone: it may hold GPU memory."""
        return self._strays.end(self._own(), GONE_SECONDS, supervisor.KILL_TIMEOUT)

    def _listens(self, server: int, now: float) -> bool:
        if self._port is None:
            return now - self._began >= NO_PORT_SECONDS
        return proof.listens(processes.below(server), self._port)

    def _own(self, *more: int) -> frozenset[int]:
        return frozenset(more) | (self._pool.pids if self._pool else frozenset())


def supervise(start: Start, pool: Pool | None, slot: Slot | None = None) -> int:
    """Run engines until one is told to end, or none comes to serve; the launcher's exit status (see session.leave).

    ``start`` decides what to run, anew each time. Raises a WeightcacheError where nothing can be run (any more).
    """
    processes.adopt_orphans()
    try:
        return _supervise(start, pool, slot)
    finally:
        if pool is not None:
            pool.close()


@dataclass(frozen=True, slots=True)
class _Life:
    """One engine's. ``status`` as in session.Served."""

    status: int
    text: str
    interrupted: bool = False
    served: bool = False
    hopeless: bool = False
    """Whether the same arguments will never do."""


class _Missing(Exception):
    """The interpreter cannot be executed, and could be before: its environment is being made anew, perhaps."""


class _Starter:
    """See child.Starter. That there is nothing to start is a mistake of the operator's only if nothing ever was."""

    def __init__(self, start: child.Starter) -> None:
        self._start = start
        self._did = False

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], setup: Callable[[], None]
    ) -> child.Child:
        try:
            made = self._start(command, environment, setup)
        except UsageError as error:
            if not self._did:
                raise
            raise _Missing(error.message) from None
        self._did = True
        return made


def _supervise(start: Start, pool: Pool | None, slot: Slot | None) -> int:
    starter = _Starter(pool.start if pool else child.fresh)
    restarts = deaths = missing = 0
    while True:
        try:
            life, missing = _live(start, pool, starter), 0
        except _Missing as error:  # nobody knows how long that takes, and it says nothing about engines
            life, missing = _Life(UsageError.exit_status, f"cannot be started: {error}"), missing + 1
        except WeightcacheError as error:
            # The service manager starts a slot's launcher again at once: the pauses have to be here.
            at_once = slot is None and not restarts
            if at_once or isinstance(error, UsageError | ConfigError) or deaths + 1 >= MOST_DEATHS:
                raise
            life, missing = _Life(error.exit_status, f"cannot be started: {error.message}"), 0
        if life.interrupted:
            return life.status
        if slot is not None:
            slot.over(life.text)
        if not missing:
            deaths = 0 if life.served else deaths + 1
        if life.hopeless:
            say(f"the engine {life.text}: its options cannot work, so it is not started again")
            return life.status
        if deaths >= MOST_DEATHS:
            say(f"the engine {life.text}, {deaths} times in a row before it served: giving up")
            return life.status
        restarts += 1
        pause = _pause(missing or deaths)
        when = f" in {pause:.0f} s" if pause else ""
        say(f"the engine {life.text}: starting it again{when} ({counted(restarts)} so far)")
        (slot.pause if slot else time.sleep)(pause)  # a signal ends the launcher here, as it does any program


def _pause(times: int) -> float:
    """Seconds, after so many failures in a row."""
    return min(FIRST_PAUSE * 2 ** min(times - 1, 10), LAST_PAUSE) if times else 0.0


def _live(start: Start, pool: Pool | None, starter: child.Starter) -> _Life:
    began = time.monotonic()
    with start() as launch:
        attendant = Attendant(launch.port, pool, processes.Strays())
        served = session.serve(launch, starter, attendant)
    # Listening is not enough: it comes before the server's own warm-up, and with a held port before everything else.
    listened = attendant.listened_for(SERVED_SECONDS)
    did_serve = served.serving or (launch.slot.stood if launch.slot is not None else listened)
    if not served.interrupted and not attendant.clear():
        say(f"some of the engine's processes do not end within {supervisor.KILL_TIMEOUT:.0f} s")
    refused = served.status == UsageError.exit_status and not served.weights and not did_serve
    text = f"{ended(served.status)} after {lasted(time.monotonic() - began)}"
    return _Life(served.status, text, served.interrupted, did_serve, refused)


def ended(status: int) -> str:
    """How a server ended, for a sentence about it."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def lasted(seconds: float) -> str:
    """A time in the two largest units that say something: ``3 h 12 min``, ``2 min 5 s``, ``4 s``."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def counted(restarts: int) -> str:
    """``1 restart``, ``2 restarts``."""
    return "1 restart" if restarts == 1 else f"{restarts} restarts"
