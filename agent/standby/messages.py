"""The slot channel: orders of the launcher to the processes of its engine, and their answers.

A SOCK_SEQPACKET connection from each process (the server's main process, each rank) to the launcher, for as long as
both live; a packet is one message. Orders are numbered, and each is answered once with Done, in any order. A process
whose connection ends has lost its launcher, and ends as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weightcache import records


@dataclass(frozen=True, slots=True)
class Process:
    """A process that another one with its number is not taken for: ``started`` is field 22 of /proc/PID/stat."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What the processes of an engine in a slot are told (Directive.slot).

    ``channel``: path of the launcher's socket for this protocol. ``lock``: path of the file whose bytes are the
    engine's resources (weightcache.standby.locks). ``private``: path of the Unix socket that the HTTP server listens
    on while it is no active one. ``plan``: path of the file in which both slots agree on the bytes of KV memory, and
    ``reserve_bytes``: GPU memory that the active engine leaves to the standby. ``kv_bytes``: of KV memory on each GPU,
    0 if that is to be measured. ``unproven``: whether kinds of KV memory may be used that no run on a GPU has shown.
    ``engine``: EngineConfig.digest of the engine's file.
    """

    channel: str
    lock: str
    private: str
    plan: str = ""
    reserve_bytes: int = 0
    kv_bytes: int = 0
    unproven: bool = False
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """First message of a process. ``rank`` is -1 for the main process. The launcher takes the pid from the kernel."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The main process: its server is up on the private socket and warmed up. A rank: its event loop runs."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The event loop of the rank, or of the HTTP server, came round; sent by its own thread, about once a second."""


@dataclass(frozen=True, slots=True)
class Done:
    """An order was carried out, or could not be (``problem``: one sentence). ``seconds`` by step."""

    order: int
    problem: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Elect:
    """Main: take the lock's byte 0, however long that takes. An engine that has it is the only one that may accept."""

    order: int


@dataclass(frozen=True, slots=True)
class Own:
    """Rank: take byte 1 + rank, wait until every process of ``fence`` is gone, then map the KV memory.

    All of that within ``seconds``.
    """

    order: int
    fence: tuple[Process, ...]
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Accept:
    """Main: accept on the public socket, which comes with this packet."""

    order: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Main: accept no more on the public socket, let requests run for ``seconds``, abort the rest, forget prefixes."""

    order: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """Rank: unmap the KV memory and give its byte back."""

    order: int


@dataclass(frozen=True, slots=True)
class Yield:
    """Main: give byte 0 back."""

    order: int


Answer = Joined | Ready | Beat | Done
Order = Elect | Own | Accept | Retire | Release | Yield
_ANSWERS: tuple[type[Answer], ...] = (Joined, Ready, Beat, Done)
_ORDERS: tuple[type[Order], ...] = (Elect, Own, Accept, Retire, Release, Yield)
Role = Literal["starting", "standby", "promoting", "active", "retiring", "parked", "down"]
"""What a slot's engine is, in every output."""


def encode(message: Answer | Order) -> bytes:
    """One packet."""
    return records.to_tagged(message)


def decode_answer(data: bytes) -> Answer:
    """What a process of the engine sent. Raises ValueError."""
    return records.from_tagged(_ANSWERS, data)


def decode_order(data: bytes) -> Order:
    """What the launcher sent. Raises ValueError."""
    return records.from_tagged(_ORDERS, data)
