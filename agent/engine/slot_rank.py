"""A rank of an engine in a slot: its lock, its KV memory, and the beat of its event loop."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from weightcache.engine import adapter_slot as sglang, directive as directives, slot_channel
from weightcache.engine.directive import Decision, Directive
from weightcache.engine.slot_channel import Channel, timed
from weightcache.errors import UsageError, WeightcacheError
from weightcache.standby import fence
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import Own, Ready, Release, Slot

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
REST_SECONDS = 0.02


class Memory(Protocol):
    """The KV memory of one rank, which is there while the rank owns it."""

    def check(self, scheduler: Any) -> None:
        """Refuse an engine whose KV memory cannot come and go, before it has any. Raises WeightcacheError."""

    def prove(self) -> None:
        """Refuse an engine whose KV memory was made in a way that is not directed here. Raises WeightcacheError."""

    def map(self, seconds: float) -> None:
        """Have it; what is not free yet is waited for until ``seconds`` are over. Raises a WeightcacheError."""

    def unmap(self) -> None:
        """Give it up, with its content."""


class HostMemory:
    """The KV memory of an engine on the CPU is small, and stays."""

    def check(self, scheduler: Any) -> None:
        """Any will do."""

    def prove(self) -> None:
        """Any will do."""

    def map(self, seconds: float) -> None:
        """It is there."""

    def unmap(self) -> None:
        """Stays. What was computed is forgotten by the main process, which flushes."""


class SlotRank:
    """This process's rank, from the moment that it knows which one it is."""

    def __init__(self, directive: Directive, slot: Slot, memory: Memory) -> None:
        self._directive, self._slot, self._memory = directive, slot, memory
        self._channel: Channel | None = None
        self._next_beat = 0.0
        self._owns = threading.Event()
        self._moves = False
        """Memory comes or goes just now."""

    def around_rank_known(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Join, before anything is loaded."""
        rank = sglang.global_rank_of(scheduler)
        if self._channel is None:
            if why := sglang.refused(scheduler.server_args):
                self._refuse(rank, UsageError(why))
            self._join(rank)
        return original(scheduler, *args, **kwargs)

    def before_pools(self, scheduler: Any) -> None:
        """The model is known, and no KV memory is there yet."""
        try:
            self._memory.check(scheduler)
        except WeightcacheError as error:
            self._refuse(sglang.global_rank_of(scheduler), error)

    def _refuse(self, rank: int, error: WeightcacheError) -> NoReturn:
        directives.send_report(self._directive, Decision(rank, "target", "refused", error.code, error.message))
        raise error

    def around_input(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called in every round of every event loop."""
        self._beat()
        if self._channel is not None and not self._owns.is_set():
            self._rest()
        return original(*args, **kwargs)

    def _beat(self) -> None:
        if self._channel is not None and (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._channel.beat()

    def _rest(self) -> None:
        """Go round seldom, since without its memory an engine computes next to nothing, and SGLang's loop never waits.

        And not at all while memory comes or goes: after each call of the driver, the thread that takes it would wait
        for the interpreter.
        """
        self._owns.wait(REST_SECONDS)
        while self._moves:
            self._owns.wait(REST_SECONDS)
            self._beat()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        self._moves = True
        try:
            yield
        finally:
            self._moves = False

    def ready(self) -> None:
        """The event loop begins."""
        if self._channel is not None:
            try:
                self._memory.prove()
            except WeightcacheError as error:
                slot_channel.end(error.message)
            self._channel.send(Ready())

    def _join(self, rank: int) -> None:
        self._lock = ByteLock(Path(self._slot.lock), 1 + rank)
        # A forked child shares the lock, which would outlive this process with it.
        os.register_at_fork(after_in_child=self._lock.close)
        self._channel = Channel(self._slot.channel, rank, {Own: self._own, Release: self._release})

    def _own(self, order: Own, _: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        until = time.monotonic() + order.seconds
        with timed(seconds, "lock"):
            _take(self._lock, order.seconds)
        try:
            with timed(seconds, "fence"):
                left = fence.wait(order.fence, _left(until))
            if left:
                pids = ", ".join(str(process.pid) for process in left)
                raise WeightcacheError(f"may still write KV memory after {order.seconds:g} s: {pids}")
            with timed(seconds, "map"), self._moving():
                self._memory.map(_left(until))
            self._owns.set()
        except BaseException:
            self._lock.give_back()
            raise
        return seconds

    def _release(self, _: Release, __: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        self._owns.clear()
        with timed(seconds, "unmap"), self._moving():
            self._memory.unmap()
        self._lock.give_back()
        return seconds


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _take(lock: ByteLock, seconds: float) -> None:
    """Take the lock within ``seconds``. Raises WeightcacheError; the thread that waits then goes on to.

    The launcher ends an engine of which an order failed, and that thread with it.
    """
    thread = threading.Thread(target=lock.take, name="weightcache-lock", daemon=True)
    thread.start()
    thread.join(seconds)
    if not lock.held:
        raise WeightcacheError(f"byte {lock.byte} of {lock.path} was not free for {seconds:g} s")
