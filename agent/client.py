"""A blocking conversation with an agent, for engines, loaders and commands. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from weightcache import protocol, transport
from weightcache.errors import AgentUnavailable, Mismatch, PermissionRefused, ProtocolError

M = TypeVar("M")
DEFAULT_TIMEOUT = 10.0
AGENT_USER = "weightcache"


class Conversation:
    """One connection to one agent. Closing it ends whatever the connection stands for (a lease, a publication)."""

    def __init__(self, path: Path | str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Connect within ``timeout`` seconds. Raises AgentUnavailable or PermissionRefused."""
        self.path = path
        self.sock = transport.connect(path, time.monotonic() + timeout)
        self._check_owner()

    def _check_owner(self) -> None:
        # A socket-activated listener shows PID 1's credentials, hence root; anybody else is an impostor.
        _, uid, _ = transport.peer_credentials(self.sock)
        if uid not in trusted_uids():
            self.close()
            raise PermissionRefused(f"the socket {self.path} belongs to uid {uid}, which is no agent's user")

    def send(self, message: protocol.Message, fds: Sequence[int] = (), timeout: float = DEFAULT_TIMEOUT) -> None:
        """Send one message; the descriptors stay the caller's."""
        self.sock.settimeout(timeout)
        try:
            transport.send_packet(self.sock, protocol.encode(message, len(fds)), fds)
        except OSError as error:
            raise AgentUnavailable(f"the agent at {self.path} went away ({error})") from None

    def receive(self, timeout: float = DEFAULT_TIMEOUT, max_fds: int = 0) -> tuple[protocol.Message, tuple[int, ...]]:
        """Wait for the next message; the caller owns the descriptors that come with it.

        Raises the error that a Failure stands for (a Mismatch carries its ``differences``), AgentUnavailable at the
        end of the connection or of ``timeout`` seconds, ProtocolError for anything malformed.
        """
        self.sock.settimeout(max(timeout, 0.001))
        try:
            packet = transport.receive_packet(self.sock, max_fds)
        except TimeoutError:
            raise AgentUnavailable(f"the agent at {self.path} did not answer within {timeout:g} s") from None
        except OSError as error:
            raise AgentUnavailable(f"the agent at {self.path} went away ({error})") from None
        if not packet.data:
            raise AgentUnavailable(f"the agent at {self.path} closed the connection")
        try:
            message = protocol.decode(packet.data, len(packet.fds))
            if isinstance(message, protocol.Failure):
                raise raised(message)
        except BaseException:
            packet.close()
            raise
        return message, packet.fds

    def readable(self, seconds: float) -> bool:
        """Whether something (the end included) can be received within ``seconds``."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def request(
        self,
        message: protocol.Message,
        answer: type[M],
        timeout: float = DEFAULT_TIMEOUT,
        on_progress: Callable[[protocol.LoadProgress], None] | None = None,
    ) -> M:
        """Send ``message`` and wait for ``answer``, passing Progress messages to ``on_progress``.

        ``timeout`` seconds bound the whole exchange.
        """
        deadline = time.monotonic() + timeout
        self.send(message, timeout=timeout)
        while True:
            reply, _ = self.receive(deadline - time.monotonic())
            if isinstance(reply, answer):
                return reply
            if not isinstance(reply, protocol.Progress):
                raise ProtocolError(f"the agent at {self.path} answered {type(reply).__name__}")
            if on_progress is not None:
                on_progress(reply.progress)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def raised(message: protocol.Failure) -> Exception:
    """The exception for a Failure; a Mismatch keeps the differing fields as ``differences``."""
    error = message.error()
    if isinstance(error, Mismatch):
        error.differences = message.differences
    return error


def trusted_uids() -> frozenset[int]:
    """Users whose sockets count as an agent's: root, this user, and the account the packages create."""
    uids = {0, os.geteuid()}
    with contextlib.suppress(KeyError):
        uids.add(pwd.getpwnam(AGENT_USER).pw_uid)
    return frozenset(uids)


def alive(path: Path | str, timeout: float = 1.0) -> bool:
    """Whether something accepts connections at ``path``."""
    try:
        transport.connect(path, time.monotonic() + timeout).close()
    except (AgentUnavailable, PermissionRefused):
        return False
    return True
