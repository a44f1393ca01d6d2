"""How the loaders of all nodes find each other before any of them imports SGLang.

Node 0 listens at its own host's port; the others connect and say who they are. Whoever is not one of them (garbage,
silence, another protocol, a node that is there already) is dropped, and disturbs nobody. A node that is one of them,
but not like node 0, ends the launch on all nodes with the same sentence.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

from weightcache.errors import LoadFailed, ProtocolError
from weightcache.loader import beacon
from weightcache.loader.facts import difference
from weightcache.loader.meeting import Meeting, named, say
from weightcache.loader.wire import Failed, Hello, Look, Message, Waiting, Welcome, Wire
from weightcache.text import escape

HELLO_SECONDS = 10.0
"""How long a connection may take to say who it is."""
STRANGERS = 64
"""How many connections may be silent at once; one more ends the oldest."""
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
LATE_SECONDS = 5.0
"""How long a difference is told to nodes that come after it was found."""
SAY_SECONDS = 15.0
"""Between two lines about what is waited for: a loader that says nothing would be taken for a stalled one."""
COMPLAINTS = 20
"""How many dropped connections are worth a line."""

ADVICE = "`wcache status` there says more, and `wcache load` there takes part (--again where it holds weights)"

_GROUP = re.compile(r"[0-9A-Za-z-]{1,64}")


def meet(me: Hello, port: int, seconds: float) -> Meeting:
    """Wait at most ``seconds`` until all nodes are there and alike. Raises LoadFailed: who is missing, what differs."""
    if me.node == 0:
        return _Host(me, port, seconds).meet()
    with beacon.Beacon(me, port):
        return _join(me, port, seconds)


class _Host:
    """Node 0 while not all are there. ``_strangers`` have until then to say who they are."""

    def __init__(self, me: Hello, port: int, seconds: float) -> None:
        self._me = me
        self._port = port
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._present: dict[int, Wire] = {}
        self._strangers: dict[Wire, float] = {}
        self._events = selectors.DefaultSelector()
        self._complaints = 0

    def meet(self) -> Meeting:
        """Raises LoadFailed, after all who are there were told the same."""
        with ExitStack() as cleanup:
            cleanup.callback(self._leave)
            listener = cleanup.enter_context(_listen(self._me.nodes[0], self._port))
            try:
                self._gather(listener)
                for node, wire in self._present.items():
                    if problem := _send(wire, Welcome(self._me.group)):
                        raise LoadFailed(f"the loader of {named(self._me.nodes, node)} vanished ({problem})")
            except LoadFailed as error:
                for wire in self._present.values():
                    _send(wire, Failed(error.message))
                raise
            wires, self._present = self._present, {}
            return Meeting(0, self._me.nodes, self._me.group, wires)

    def _gather(self, listener: socket.socket) -> None:
        self._events.register(listener, selectors.EVENT_READ)
        tell = _Reminder()
        refusal = ""
        while missing := [node for node in range(1, len(self._me.nodes)) if node not in self._present]:
            now = time.monotonic()
            if now >= self._deadline:
                raise LoadFailed(
                    refusal or f"{self._described(missing)} did not come within {self._seconds:g} s; {ADVICE}"
                )
            tell(f"waiting for {self._described(missing)}")
            for wire in [wire for wire, until in self._strangers.items() if until <= now]:
                self._drop(wire, f"it did not say who it is within {HELLO_SECONDS:g} s")
            next_time = min(self._deadline, now + SAY_SECONDS, *self._strangers.values())
            for key, _ in self._events.select(next_time - now):
                if key.fileobj is listener:
                    self._accept(listener)
                elif isinstance(key.fileobj, Wire) and key.fileobj.fileno() >= 0:
                    new = self._read(key.fileobj)
                    if new and not refusal:
                        refusal, self._deadline = new, min(self._deadline, time.monotonic() + LATE_SECONDS)
        if refusal:
            raise LoadFailed(refusal)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who left before being let in
            sock, address = listener.accept()
            if len(self._strangers) >= STRANGERS:
                self._drop(next(iter(self._strangers)), "too many connections that do not say who they are")
            wire = Wire(sock, str(address[0]))
            self._strangers[wire] = time.monotonic() + HELLO_SECONDS
            self._events.register(wire, selectors.EVENT_READ)

    def _read(self, wire: Wire) -> str:
        """Let a stranger in, or notice that a node left; returns how a node differs from this one, if it does."""
        try:
            messages = wire.receive()
            if not messages:
                return ""
            if wire in self._strangers and (looks := _looks(messages)):
                wire.send(Waiting(looks.nodes == self._me.nodes))
                self._forget(wire)
                return ""
            hello = messages[0]
            if wire not in self._strangers or len(messages) > 1 or not isinstance(hello, Hello):
                raise ProtocolError("it said something else than who it is")
            if hello.node in self._present:
                raise ProtocolError(f"{named(self._me.nodes, hello.node)} is there already")
            refusal = self._refusal(hello)
        except (OSError, ProtocolError) as error:
            self._drop(wire, str(error))
            return ""
        del self._strangers[wire]
        self._present[hello.node] = wire
        return refusal

    def _refusal(self, hello: Hello) -> str:
        """How another node differs from this one. Raises ProtocolError for a node that there cannot be."""
        nodes = self._me.nodes
        if not 0 < hello.node < len(nodes):
            raise ProtocolError(f"there is no other node {hello.node}")
        who, me = named(nodes, hello.node), named(nodes, 0)
        for theirs, mine, what in (
            (hello.nodes, nodes, "nodes"),
            (hello.ranks, self._ranks(hello.node), "ranks"),
        ):
            if theirs != mine:
                shown = escape(_listed(theirs))[:200]
                return f"{who} has the {what} {shown}, {me} has {_listed(mine)} for it: all need the same configuration"
        return escape(difference(who, hello.facts, me, self._me.facts))

    def _drop(self, wire: Wire, why: str) -> None:
        self._complaints += 1
        if self._complaints <= COMPLAINTS:
            say(f"dropped a connection from {wire.address}: {escape(why)[:200]}")
        self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        self._events.unregister(wire)
        self._strangers.pop(wire, None)
        self._present = {node: other for node, other in self._present.items() if other is not wire}
        wire.close()

    def _leave(self) -> None:
        self._events.close()
        for wire in (*self._strangers, *self._present.values()):
            wire.close()

    def _ranks(self, node: int) -> tuple[int, ...]:
        """All nodes have equally many ranks, in the order of the nodes."""
        count = len(self._me.ranks)
        return tuple(range(node * count, (node + 1) * count))

    def _described(self, missing: Sequence[int]) -> str:
        nodes = self._me.nodes
        return ", ".join(f"node {node} ({nodes[node]}, ranks {_listed(self._ranks(node))})" for node in missing)


def _join(me: Hello, port: int, seconds: float) -> Meeting:
    """Connect to node 0, again and again, until it says that all are there."""
    deadline = time.monotonic() + seconds
    where = f"node 0 ({me.nodes[0]}:{port})"
    tell = _Reminder()
    problem = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        tell(f"waiting for {where}")
        try:
            with ExitStack() as cleanup:
                sock = socket.create_connection((me.nodes[0], port), timeout=min(left, CONNECT_SECONDS))
                wire = Wire(sock, me.nodes[0])
                cleanup.callback(wire.close)
                wire.send(me)
                group = _answer(wire, deadline, where)
                cleanup.pop_all()
                return Meeting(me.node, me.nodes, group, {0: wire})
        except (OSError, ProtocolError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        time.sleep(max(min(RETRY_SECONDS, deadline - time.monotonic()), 0))
    raise LoadFailed(f"{where} could not be reached within {seconds:g} s: {escape(problem)}; {ADVICE}")


def _answer(wire: Wire, deadline: float, where: str) -> str:
    """The launch's name. Raises LoadFailed for a refusal, ConnectionError and ProtocolError when node 0 is another."""
    tell = _Reminder()
    while (left := deadline - time.monotonic()) > 0:
        messages = wire.receive(min(left, SAY_SECONDS))
        for message in messages:
            if isinstance(message, Failed):  # perhaps right behind a welcome
                raise LoadFailed(escape(message.reason))
        match messages:
            case [Welcome(group)] if _GROUP.fullmatch(group):
                return group
            case []:
                tell(f"{where} is there, waiting for all others")
            case _:
                raise ProtocolError(f"it answered {type(messages[0]).__name__}")
    raise ProtocolError("it is there, but others are missing")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return beacon.listen(host, port)
    except OSError as error:
        raise LoadFailed(f"node 0 cannot listen at {host}:{port}: {error.strerror or error}") from None


def _looks(messages: Sequence[Message]) -> Look | None:
    """What a host asks that looks for a load to take part in."""
    match messages:
        case [Look() as look]:
            return look
    return None


def _send(wire: Wire, message: Message) -> str:
    """Send, if it can be sent; otherwise says why not."""
    try:
        wire.send(message)
    except (OSError, ProtocolError) as error:
        return str(error)
    return ""


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


class _Reminder:
    """Says the same thing now and then."""

    def __init__(self) -> None:
        self._due = time.monotonic() + 1.0

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + SAY_SECONDS
            say(text)
