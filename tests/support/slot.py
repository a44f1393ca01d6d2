"""A launcher's end of the slot channel, in place of wcache-launch's, for tests of what takes the orders."""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from weightcache import transport
from weightcache.standby.messages import (
    Accept,
    Answer,
    Beat,
    Done,
    Elect,
    Joined,
    Order,
    Own,
    Process,
    Ready,
    Release,
    Retire,
    Yield,
    decode_answer,
    encode,
)

MAIN = -1


class SlotLauncher:
    """Takes connections at ``path``, keeps what each process says, and gives orders."""

    def __init__(self, path: Path) -> None:
        self.beats: collections.Counter[int] = collections.Counter()
        self.said: dict[int, list[Answer]] = {}
        self.pids: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._connections: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def elect(self) -> Done:
        """Wait until the main process has the lock."""
        return self.ask(MAIN, Elect(next(self._numbers)))

    def send_elect(self) -> Callable[[float], Done]:
        """The same without waiting; call the answer to wait."""
        return self.send(MAIN, Elect(next(self._numbers)))

    def own(self, rank: int = 0, fence: Sequence[Process] = (), seconds: float = 60.0) -> Done:
        """Have a rank take its memory."""
        return self.ask(rank, Own(next(self._numbers), tuple(fence), seconds))

    def accept(self, listener: socket.socket) -> Done:
        """Have the main process accept on ``listener``."""
        return self.ask(MAIN, Accept(next(self._numbers)), [listener.fileno()])

    def retire(self, seconds: float) -> Done:
        """Have the main process accept no more."""
        return self.send_retire(seconds)(60.0)

    def send_retire(self, seconds: float) -> Callable[[float], Done]:
        """The same without waiting; call the answer to wait."""
        return self.send(MAIN, Retire(next(self._numbers), seconds))

    def release(self, rank: int = 0) -> Done:
        """Have a rank give its memory up."""
        return self.ask(rank, Release(next(self._numbers)))

    def give_back(self) -> Done:
        """Have the main process give the lock back."""
        return self.ask(MAIN, Yield(next(self._numbers)))

    def ask(self, rank: int, order: Order, fds: Sequence[int] = (), seconds: float = 60.0) -> Done:
        """Give an order and wait until it is answered."""
        return self.send(rank, order, fds)(seconds)

    def send(self, rank: int, order: Order, fds: Sequence[int] = ()) -> Callable[[float], Done]:
        """Give an order; call the answer to wait."""
        transport.send_packet(self._connections[rank], encode(order), fds)
        return lambda seconds: self._done(rank, order.order, seconds)

    def wait_ready(self, ranks: Sequence[int] = (MAIN, 0), seconds: float = 180.0) -> None:
        """Until these processes are ready."""
        with self._changed:
            ready = self._changed.wait_for(lambda: all(Ready() in self.said.get(rank, []) for rank in ranks), seconds)
        assert ready, self.said

    def wait_joined(self, rank: int, seconds: float = 60.0) -> None:
        """Until this process joined."""
        with self._changed:
            assert self._changed.wait_for(lambda: rank in self._connections, seconds), self.said

    def wait_beats(self, rank: int, number: int, seconds: float = 20.0) -> None:
        """Until the event loop of a process came round so many more times."""
        with self._changed:
            target = self.beats[rank] + number
            assert self._changed.wait_for(lambda: self.beats[rank] >= target, seconds), self.beats

    def close(self) -> None:
        """End as a killed launcher does: every connection ends."""
        for sock in (self._listener, *self._connections.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _done(self, rank: int, order: int, seconds: float) -> Done:
        def found() -> Done | None:
            return next((m for m in self.said[rank] if isinstance(m, Done) and m.order == order), None)

        with self._changed:
            done = self._changed.wait_for(found, seconds)
        assert done is not None, f"order {order} was not answered: {self.said}"
        return done

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        rank: int | None = None
        with contextlib.suppress(OSError):
            while (packet := transport.receive_packet(sock)).data:
                message = decode_answer(packet.data)
                with self._changed:
                    if isinstance(message, Joined):
                        rank = message.rank
                        self._connections[rank], self.pids[rank] = sock, transport.peer_credentials(sock)[0]
                    assert rank is not None, message
                    if isinstance(message, Beat):
                        self.beats[rank] += 1
                    else:
                        self.said.setdefault(rank, []).append(message)
                    self._changed.notify_all()
