"""A slot's launcher (docs/standby.md): what it has beside its engines, and what it hears and does while one runs."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from typing import TYPE_CHECKING, Self

from weightcache.errors import UsageError, WeightcacheError
from weightcache.launch import promotion
from weightcache.launch.channel import Channel
from weightcache.launch.console import say
from weightcache.launch.control import Control
from weightcache.launch.director import Director
from weightcache.launch.orders import MAIN
from weightcache.launch.slot_world import SlotWorld
from weightcache.standby import files, messages
from weightcache.standby.control import Command, Reply
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Joined
from weightcache.standby.priority import Claim

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from weightcache.launch.board import Board
    from weightcache.launch.channel import Heard
    from weightcache.launch.notify import Manager
    from weightcache.launch.world import Limits
    from weightcache.standby.messages import Role
    from weightcache.standby.places import EnginePaths, SlotName

LAUNCHERS_BYTE = 1 << 30
"""Of the engine's lock file, for the launcher of slot a; the next one is slot b's. Ranks' bytes are far below."""
BETWEEN_ENGINES = 600.0
"""Seconds in which nobody pings the service manager: the last engine goes away, the next one is decided on."""


class Slot:
    """One slot; use it as a context manager. The supervisor knows it as its Aside (weightcache.launch.supervisor)."""

    def __init__(
        self,
        name: SlotName,
        paths: EnginePaths,
        listener: socket.socket,
        limits: Limits,
        ranks: int,
        board: Board,
        manager: Manager,
    ) -> None:
        self.name, self.listener = name, listener
        self.stood = False
        """Whether the engine of this life, or the last one, was ready to take over."""
        self._paths, self._limits, self._ranks = paths, limits, ranks
        self._board, self._manager = board, manager
        known = board.status
        self._claim = Claim(paths, frozenset(known.gpus), known.priority, lambda text: say(f"slot {name}: {text}"))
        self._director: Director | None = None
        self._role: Role = "starting"
        self._began = self._ping_at = time.monotonic()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            byte = LAUNCHERS_BYTE + ("a", "b").index(self.name.slot)
            self._lock = stack.enter_context(contextlib.closing(ByteLock(self._paths.lock, byte)))
            if not self._lock.try_take():
                raise UsageError(f"{self.name} has a launcher already")
            self._selector = stack.enter_context(contextlib.closing(selectors.EpollSelector()))
            self._control = stack.enter_context(contextlib.closing(_control(self._paths, self.name, self._carry_out)))
            self._selector.register(self._control, selectors.EVENT_READ)
            stack.callback(self._clear_private)
            self._publish()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._manager.stopping()
        self._role = "down"
        self._publish()
        self._stack.close()

    # -- for the session -----------------------------------------------------------------------------------------------

    def told(self, directory: Path) -> messages.Slot:
        """What the engine's processes are told; the channel will be in ``directory``."""
        self._channel_path = directory / "slot"
        return messages.Slot(
            os.fspath(self._channel_path),
            os.fspath(self._paths.lock),
            os.fspath(self._paths.private(self.name.slot)),
            os.fspath(self._paths.plan),
            self._limits.reserve_bytes,
            self._limits.kv_bytes,
            self._limits.unproven,
            self._limits.engine,
        )

    def over(self, text: str) -> None:
        """An engine is gone, and ``text`` says how; what was found out before says more."""
        self._board.problem = self._board.problem or f"the engine {text}"
        self._publish()

    def pause(self, seconds: float) -> None:
        """Wait between two engines, and answer commands meanwhile."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._ping_at = self._manager.ping(now, healthy=True)
            self._selector.select(max(0.0, min(until, self._ping_at, self._control.due()) - now))
            self._control.attend()

    # -- for the supervisor --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An engine is about to be started."""
        self._clear_private()
        self._began = time.monotonic()
        self._channel = Channel(self._channel_path, self._ranks)
        self._world = SlotWorld(self.name, self._paths, self._channel, self.listener, self._claim)
        self._director = Director(self._world, self._ranks, self._limits, self._began)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self.stood = self._said_end = False
        self._board.engine_starts()
        self._manager.bear(None)
        self._tell()

    def fileno(self) -> int:
        """Readable when a process of the engine said something, or somebody gave a command."""
        return self._selector.fileno()

    def due(self) -> float:
        """When to call ``attend`` although nothing was said, on CLOCK_MONOTONIC."""
        if self._director is None:
            return math.inf
        return min(self._director.due(), self._ping_at, self._channel.due(), self._control.due())

    def attend(self) -> float | None:
        """Hear everybody and do what is due. An answer: the engine is to be killed after so many seconds."""
        if self._director is None:
            return None
        said = self._channel.take()
        # Who is lost comes last, the main process first: its end is what ends the others.
        said.sort(key=lambda heard: (heard.answer is None, heard.answer is None and heard.rank))
        for heard in said:
            self._hear(self._director, heard)
        self._control.attend()
        if (now := time.monotonic()) >= self._director.due():
            self._director.tick(now)
        self._tell()
        self._ping_at = self._manager.ping(now, self._director.healthy(now))
        return None if self._world.ended is None else 0.0

    def may_end(self) -> bool:
        """The engine is to end: whether it can now; ask again after the next ``attend``."""
        may = self._director is None or self._director.stop(time.monotonic())
        self._tell()
        return may

    def killing(self) -> None:
        """The engine is about to be killed: nobody pings until the next one starts."""
        self._manager.bear(BETWEEN_ENGINES)

    def ended(self) -> None:
        """The engine's main process is gone: nothing of the rest may stay."""
        if self._director is None:
            return
        self._manager.bear(BETWEEN_ENGINES)
        self._channel.kill()
        self._selector.unregister(self._channel)
        self._channel.close()
        self._director = None
        self._tell()

    # ------------------------------------------------------------------------------------------------------------------

    def _hear(self, director: Director, heard: Heard) -> None:
        now = time.monotonic()
        if heard.answer is None:
            director.lost(heard.rank, heard.why)
        elif isinstance(heard.answer, Joined):
            director.joined(heard.rank, heard.process, now)
        else:
            director.heard(heard.rank, heard.answer, now)
            self._tell()  # a role may be a short one

    def _tell(self) -> None:
        """Say what has changed, to whoever reads it."""
        director = self._director
        before, self._role = self._role, director.role if director is not None else "starting"
        if director is not None and self._world.ended and not self._said_end:
            self._said_end = True
            self._board.problem = self._world.ended
            say(f"slot {self.name}: {self._world.ended}: ending the engine")
        if self._role != before and director is not None:
            self._changed(director, before)
        if self._role == "parked":
            self._board.problem = self._outranked()  # comes and goes without another role
        self._publish()

    def _changed(self, director: Director, before: Role) -> None:
        if line := self._line(director, before):
            say(f"slot {self.name}: {line}")
        if self._role in ("standby", "parked", "active"):
            self.stood = True
            self._board.problem = self._outranked()
            self._manager.ready()

    def _outranked(self) -> str:
        return self._world.outranked() if self._role == "parked" else ""

    def _line(self, director: Director, before: Role) -> str:
        if self._role == "active" and director.promotion is not None:
            self._board.promoted(director.promotion)
            return promotion.sentence(director.promotion, self._board.predecessor(director.succeeds_itself))
        if self._role not in ("standby", "parked"):
            return ""
        if not self.stood:
            return f"{self._role} (ready after {time.monotonic() - self._began:.1f} s)"
        if (why := self._outranked()) and not self._world.blind:  # which was said when that began
            return f"parked: {why}"
        return "retired" if before == "retiring" and self._role == "standby" else self._role

    def _publish(self) -> None:
        members = self._director.members if self._director is not None else {}
        main = members[MAIN].process if MAIN in members else None
        ranks = self._director.own if self._director is not None else ()
        self._manager.status(self._board.show(self._role, main, ranks))

    def _carry_out(self, command: Command) -> Reply:
        """See weightcache.standby.control."""
        marker, problem = self._paths.parked, ""
        try:
            match command.verb:
                case "retire":
                    problem = self._director.retire(time.monotonic()) if self._director else "it has no engine now"
                case "park":
                    files.replace(marker, f"{self.name}\n")
                case "wake":
                    marker.unlink(missing_ok=True)
        except OSError as error:
            return Reply(False, f"{marker} cannot be removed ({error.strerror})", self._board.status)
        if self._director is not None:
            self._director.tick(time.monotonic())
        self._tell()
        return Reply(not problem, f"{self.name} does not retire: {problem}" if problem else "", self._board.status)

    def _clear_private(self) -> None:
        self._paths.private(self.name.slot).unlink(missing_ok=True)


def _control(paths: EnginePaths, name: SlotName, carry_out: Callable[[Command], Reply]) -> Control:
    path = paths.control(name.slot)
    try:
        return Control(path, carry_out)
    except OSError as error:
        raise WeightcacheError(f"no commands can be taken at {path} ({error.strerror or error})") from None
