"""What the launcher, the parked main process and its parked children say to each other: one packet each, JSON.

Both ends are this user's own processes on an unnamed socket pair; what comes is validated all the same.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from weightcache import records, transport
from weightcache.errors import AgentUnavailable, ProtocolError
from weightcache.warm.priority import Priority


@dataclass(frozen=True, slots=True)
class Layout:
    """Which schedulers a launch has on this host. ``ranks``: of one replica; ``attention_dp``: replicas share them."""

    ranks: int = 1
    dp_size: int = 1
    attention_dp: bool = False


@dataclass(frozen=True, slots=True)
class Park:
    """Launcher to main: import, and wait for this launch. ``arguments`` are SGLang's.

    ``children`` are the variables that children have beside main's (weightcache.warm.learned), in their order.
    """

    arguments: tuple[str, ...]
    layout: Layout
    children: tuple[dict[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Main to child: import, and wait.

    ``usual`` is the priority of a process that serves, ``facts`` is about the GPUs (weightcache.warm.device).
    """

    kind: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    usual: Priority
    facts: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything is imported. ``seconds`` since the process began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Unfit:
    """This process cannot take a launch, and ends: one sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Go:
    """Launcher to main, with standard input, output and error: become the server."""

    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Take:
    """Main to child, with the descriptors ``numbers`` (0, 1 and 2 among them): become the spawned process."""

    environment: dict[str, str]
    numbers: tuple[int, ...]
    tracker: int
    pipe: int
    binding: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Going:
    """The process is the server's from now on."""


Message = Park | Wait | Ready | Unfit | Go | Take | Going
_TYPES: tuple[type[Message], ...] = (Park, Wait, Ready, Unfit, Go, Take, Going)
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """One packet."""
    return records.to_tagged(message)


def decode(data: bytes) -> Message:
    """Raises ProtocolError."""
    try:
        return records.from_tagged(_TYPES, data)
    except ValueError as error:
        raise ProtocolError(f"a message that makes no sense ({error})") from None


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send; ``fds`` stay the caller's. Raises OSError or ProtocolError (too large)."""
    transport.send_packet(sock, encode(message), fds)


def expect(sock: socket.socket, kind: type[M], timeout: float | None, max_fds: int = 0) -> tuple[M, tuple[int, ...]]:
    """The next message, which the caller needs to be a ``kind``, and the descriptors that came with it (the caller's).

    Raises AgentUnavailable with the other side's reason (Unfit) or for one that is gone or silent, and ProtocolError.
    """
    sock.settimeout(timeout)
    try:
        packet = transport.receive_packet(sock, max_fds)
    except TimeoutError:
        raise AgentUnavailable(f"it does not answer within {timeout:.0f} s") from None
    except OSError as error:
        raise AgentUnavailable(f"it is gone ({error.strerror})") from None
    if not packet.data:
        raise AgentUnavailable("it ended")
    try:
        message = decode(packet.data)
        if isinstance(message, Unfit):
            raise AgentUnavailable(message.reason)
        if not isinstance(message, kind):
            raise ProtocolError(f"{type(message).__name__} where {kind.__name__} was expected")
    except BaseException:
        packet.close()
        raise
    return message, packet.fds
