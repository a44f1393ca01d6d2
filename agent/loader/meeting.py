"""The loaders of all nodes know of each other until all have published: a reason to fail on one ends all of them.

How they find each other is in gathering.py. From then on a connection carries nothing but ends: of one node's load,
with the reason, or, when it breaks off, of a whole host. Node 0 has a connection to each other node, and passes reasons
on.
"""

from __future__ import annotations

import contextlib
import selectors
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from weightcache.errors import ProtocolError
from weightcache.loader.wire import Failed, Finished, Message, Wire
from weightcache.text import escape

LINGER_SECONDS = 20.0
"""How long node 0 passes failures on once it has published."""


class Meeting:
    """The connections of this launch's loaders: node 0 has one to each other, those one to node 0, a single host none.

    ``group`` is the name that all ranks of the launch publish under.
    """

    def __init__(self, node: int, nodes: Sequence[str], group: str, wires: dict[int, Wire]) -> None:
        self.group = group
        self._node = node
        self._nodes = nodes
        self._wires = wires
        self._over = False

    @property
    def address(self) -> str:
        """The address by which this host talks to the others; an empty text on a single host."""
        return next((str(wire.sock.getsockname()[0]) for wire in self._wires.values()), "")

    def until(self, pidfd: int | None, seconds: float | None = None) -> str:
        """Wait until a process ends (or for ``seconds``): an empty text. Another node's failure comes as its reason."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with selectors.DefaultSelector() as events:
            if pidfd is not None:
                events.register(pidfd, selectors.EVENT_READ)
            for node, wire in self._wires.items():
                events.register(wire, selectors.EVENT_READ, node)
            while events.get_map() and (deadline is None or time.monotonic() < deadline):
                for key, _ in events.select(None if deadline is None else deadline - time.monotonic()):
                    if key.data is None:
                        return ""
                    finished, reason = self._heard(key.data)
                    if reason:
                        self._end(Failed(reason))
                        return reason
                    if finished:
                        events.unregister(key.fileobj)
                        self._wires.pop(key.data).close()
        return ""

    def _heard(self, node: int) -> tuple[bool, str]:
        """Whether a node has published, and why the launch is over, if it is."""
        name = named(self._nodes, node)
        try:
            messages = self._wires[node].receive()
        except ConnectionError as error:
            return False, f"the loader of {name} vanished ({error})"
        except ProtocolError as error:
            return False, f"{name}: {escape(error.message)}"
        for message in messages:
            match message:
                case Failed(reason):
                    return False, escape(reason if self._node else f"{name}: {reason}")
                case Finished():
                    return True, ""
                case _:
                    return False, f"{name} said {type(message).__name__} in the middle of a load"
        return False, ""

    def fail(self, reason: str) -> None:
        """Tell the others why this node does not publish. What came from them is not told again."""
        if self._wires and not self._over:
            self._end(Failed(reason if self._node else f"{named(self._nodes, 0)}: {reason}"))

    def finish(self) -> None:
        """Tell the others that this node has published; node 0 waits for them, to pass a failure on."""
        if self._node == 0 and (reason := self.until(None, LINGER_SECONDS)):
            say(f"this node's weights are published, but {reason}")
        self._end(Finished())

    def close(self) -> None:
        """End all connections: the others take it for the end of this host, unless something was said before."""
        self._over = True
        while self._wires:
            self._wires.popitem()[1].close()

    def _end(self, message: Message) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError, ProtocolError):
                wire.send(message)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def named(nodes: Sequence[str], node: int) -> str:
    """How a message calls a node."""
    return f"node {node} ({nodes[node]})"


def say(text: str) -> None:
    """One line for the log."""
    print(f"weightcache-loader: {text}", file=sys.stderr, flush=True)
