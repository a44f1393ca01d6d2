"""Ask this rank's agent for a set: one conversation, whose open connection is the lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightcache import manifest, protocol, transport
from weightcache.client import Conversation
from weightcache.engine.directive import Directive
from weightcache.engine.turns import short_turns
from weightcache.errors import AgentUnavailable, AttachFailed, ProtocolError
from weightcache.fingerprint import Fingerprint
from weightcache.manifest import Manifest
from weightcache.memory import Memory, Region, memfd
from weightcache.protocol import ArenaInfo, LoadProgress

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0


@dataclass(slots=True)
class Offer:
    """A resident set that matches, mapped already. The offer owns mapping and connection until they are taken."""

    set_id: str
    role: str
    group: str
    manifest: Manifest
    arenas: tuple[ArenaInfo, ...]
    region: Region
    conversation: Conversation
    milliseconds: dict[str, float] = field(default_factory=dict)

    def withdraw(self) -> None:
        """Give everything back: the agent sees the lease end."""
        self.region.close()
        self.conversation.close()


@dataclass(slots=True)
class Invitation:
    """The rank is empty and this process may publish its own load with ``token``."""

    token: str
    conversation: Conversation

    def withdraw(self) -> None:
        """Decline: the agent is empty again."""
        self.conversation.close()


def socket_of(directive: Directive, device: torch.device, rank: int) -> Path:
    """The public socket of the agent that holds this rank's GPU (by UUID, never by ordinal), or of this rank.

    Raises AgentUnavailable when the launcher knew none.
    """
    keys = [f"rank:{rank}"]
    if device.type == "cuda":
        from weightcache.memory.cuda_vmm import device_uuid

        uuid = device_uuid(device.index if device.index is not None else torch.cuda.current_device())
        # A loader is told ranks; an engine is told GPUs, and its rank says nothing about which GPU it got.
        keys = [uuid] if directive.purpose == "engine" else [uuid, *keys]
    for key in keys:
        if path := directive.sockets.get(key):
            return Path(path)
    raise AgentUnavailable(f"no agent serves {keys[0]}")


def ask(
    path: Path,
    directive: Directive,
    fingerprint: Fingerprint,
    memory: Memory,
    on_progress: Callable[[LoadProgress], None],
) -> Offer | Invitation:
    """Ask for the set with ``fingerprint`` and map it with ``memory``: what fails here is no reason to end a process.

    Raises the agent's refusal (Mismatch, Empty, ...), AgentUnavailable, AttachFailed or NoRoom.
    """
    start = time.perf_counter()
    conversation = Conversation(path, CONNECT_SECONDS)
    connected = time.perf_counter()
    try:
        request = protocol.Attach(
            role=fingerprint.role,
            group=directive.group,
            fingerprint=fingerprint,
            wait_seconds=directive.wait_seconds,
            donate=directive.donate,
            evict=directive.on_mismatch == "evict" and not directive.explain,
        )
        conversation.send(request)
        deadline = time.monotonic() + directive.wait_seconds + ANSWER_SECONDS
        while True:
            message, fds = conversation.receive(deadline - time.monotonic(), transport.MAX_FDS)
            if not isinstance(message, protocol.Attached):
                transport.close_all(fds)
            match message:
                case protocol.Progress(progress):
                    on_progress(progress)
                case protocol.DonationInvited(token):
                    return Invitation(token, conversation)
                case protocol.Attached():
                    received = time.perf_counter()
                    offer = _offer(message, fds, conversation, fingerprint.role, memory)
                    offer.milliseconds |= {
                        "connect": (connected - start) * 1000,
                        "receive": (received - connected) * 1000,
                        "map": (time.perf_counter() - received) * 1000,
                    }
                    return offer
                case _:
                    raise ProtocolError(f"the agent answered {type(message).__name__}")
    except BaseException:
        conversation.close()
        raise


def _offer(
    message: protocol.Attached, fds: tuple[int, ...], conversation: Conversation, role: str, memory: Memory
) -> Offer:
    try:
        if message.role != role:
            raise ProtocolError(f"the agent answered with a set for {message.role!r} instead of {role!r}")
        if len(fds) != 1 + len(message.arenas):
            raise ProtocolError(f"{len(fds)} descriptors for {len(message.arenas)} arenas and a manifest")
        mapping = _Mapping(memory, fds[1:], [arena.bytes for arena in message.arenas])
        try:
            with short_turns():  # the mapping thread needs the interpreter for microseconds between two calls
                body = manifest.decode(memfd.read_sealed(fds[0], manifest.MAX_BYTES))
            if body.bytes > sum(arena.bytes for arena in message.arenas):
                raise ProtocolError("a manifest that is larger than its arenas")
        except BaseException:
            mapping.discard()
            raise
        return Offer(message.set_id, message.role, message.group, body, message.arenas, mapping.region(), conversation)
    finally:
        transport.close_all(fds)  # the mapping alone keeps the memory


class _Mapping:
    """Maps arenas in a thread: the driver's work and the decoding of the manifest take about the same time."""

    def __init__(self, memory: Memory, fds: tuple[int, ...], sizes: list[int]) -> None:
        self._region: Region | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._map, args=(memory, fds, sizes), name="weightcache-map")
        self._thread.start()

    def _map(self, memory: Memory, fds: tuple[int, ...], sizes: list[int]) -> None:
        try:
            self._region = memory.map(fds, sizes)
        except BaseException as error:  # noqa: BLE001 - raised again in region()
            self._error = error

    def region(self) -> Region:
        """The mapping, once it is there. Raises what mapping raised."""
        self._thread.join()
        if self._region is None:
            raise self._error or AttachFailed("nothing was mapped")
        return self._region

    def discard(self) -> None:
        """Undo it."""
        self._thread.join()
        if self._region is not None:
            self._region.close()
