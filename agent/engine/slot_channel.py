"""A process's end of the slot channel (weightcache.standby.messages): it takes the launcher's orders and answers them.

Orders are carried out one after the other by a thread of their own, so that the end of the connection is noticed while
one runs: without its launcher nobody directs this engine, and it ends, which gives its locks back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from weightcache import transport
from weightcache.errors import WeightcacheError
from weightcache.standby.messages import Accept, Answer, Beat, Done, Joined, Order, decode_order, encode

logger = logging.getLogger(__name__)

MAIN = -1
"""The main process, as a rank."""
CONNECT_SECONDS = 10.0
SEND_SECONDS = 10

Handler = Callable[[Any, int], dict[str, float]]
"""Carries an order out, with the descriptor that came with it (-1: none), which is then the handler's. Answers the
seconds that each step took; raises a WeightcacheError or OSError if the order could not be carried out.
"""


class Channel:
    """One connection, for as long as the process lives. Orders of the types ``beside`` hold up no others."""

    def __init__(
        self, path: str, rank: int, handlers: Mapping[type[Any], Handler], beside: Collection[type[Any]] = ()
    ) -> None:
        self._handlers, self._beside = handlers, beside
        self._sock = _connect(path)
        os.register_at_fork(after_in_child=self._sock.close)
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Order, int]] = queue.SimpleQueue()
        self.send(Joined(rank))
        for work in (self._read, self._work):
            threading.Thread(target=work, name=f"weightcache-slot{work.__name__}", daemon=True).start()

    def send(self, message: Answer) -> None:
        """Send one message; a launcher that takes none for SEND_SECONDS directs nobody."""
        try:
            with _acquired(self._sending, SEND_SECONDS):
                transport.send_packet(self._sock, encode(message))
        except (OSError, TimeoutError):
            end("the launcher takes no messages any more, and this process ends")

    def beat(self) -> None:
        """Say that the event loop came round, unless that would mean to wait."""
        if self._sending.acquire(blocking=False):
            try:
                # One that fails is missed by the launcher, and the end of the connection is seen by who reads.
                with contextlib.suppress(OSError):
                    self._sock.send(encode(Beat()), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            finally:
                self._sending.release()

    def _read(self) -> None:
        why = "the launcher is gone"
        while True:
            try:
                packet = transport.receive_packet(self._sock, max_fds=1)
                if not packet.data:
                    break
                order = decode_order(packet.data)
            except ConnectionError:
                break
            except (WeightcacheError, ValueError, OSError) as error:
                why = f"the launcher sent what is no order ({error})"
                break
            entry = order, packet.fds[0] if packet.fds else -1
            if type(order) in self._beside:
                threading.Thread(target=self._carry_out, args=entry, name="weightcache-order", daemon=True).start()
            else:
                self._orders.put(entry)
        end(f"{why}, and this process ends")

    def _work(self) -> None:
        while True:
            self._carry_out(*self._orders.get())

    def _carry_out(self, order: Order, fd: int) -> None:
        name, handler = type(order).__name__, self._handlers.get(type(order))
        if handler is None or (fd >= 0) != isinstance(order, Accept):
            transport.close_all([fd] if fd >= 0 else [])
            self.send(Done(order.order, f"this process takes no order {name} of this kind"))
            return
        try:
            done = Done(order.order, seconds=handler(order, fd))
        except WeightcacheError as error:
            done = Done(order.order, error.message)
        except Exception as error:
            logger.debug("weightcache: %s", name, exc_info=True)
            done = Done(order.order, f"{name} failed: {type(error).__name__}: {_line(error)}")
        if done.problem:
            logger.warning("weightcache: %s: %s", name, done.problem)
        self.send(done)


def end(why: str) -> NoReturn:
    """End this process at once, and with it whatever it holds."""
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0):  # nobody may read it any more
            os.write(2, f"weightcache: {why}\n".encode()[: select.PIPE_BUF])
    finally:
        os._exit(1)


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Note how long the block took."""
    began = time.monotonic()
    yield
    seconds[step] = round(time.monotonic() - began, 6)


@contextmanager
def _acquired(lock: threading.Lock, seconds: float) -> Iterator[None]:
    if not lock.acquire(timeout=seconds):
        raise TimeoutError
    try:
        yield
    finally:
        lock.release()


def _connect(path: str) -> socket.socket:
    try:
        sock = transport.connect(path, time.monotonic() + CONNECT_SECONDS)
    except WeightcacheError:
        raise WeightcacheError(f"no launcher takes this process at {path}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
    return sock


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason was given"])[0][:300]
