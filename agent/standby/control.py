"""What the command line asks of a slot's launcher: a SOCK_SEQPACKET connection, one command, one reply."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightcache import records, transport
from weightcache.errors import AgentUnavailable, PermissionRefused, ProtocolError
from weightcache.standby.status import SlotStatus

Verb = Literal["retire", "park", "wake", "report"]


@dataclass(frozen=True, slots=True)
class Command:
    """``retire``: let the other slot be promoted. ``park``: retire, and let nobody be. ``wake``: let somebody be again.

    ``report``: only the status. A reply comes when the order is understood, not when it is carried out.
    """

    verb: Verb


@dataclass(frozen=True, slots=True)
class Reply:
    """``text`` says in one sentence why not, or what is done."""

    ok: bool
    text: str = ""
    status: SlotStatus | None = None


def encode(message: Command | Reply) -> bytes:
    """One packet."""
    return json.dumps(records.to_plain(message)).encode()


def decode_command(data: bytes) -> Command:
    """What somebody asks. Raises ValueError."""
    return records.from_plain(Command, _plain(data))


def decode_reply(data: bytes) -> Reply:
    """What the launcher answers. Raises ValueError."""
    return records.from_plain(Reply, _plain(data))


def ask(path: Path, command: Command, seconds: float) -> Reply:
    """Send ``command`` to the launcher at ``path`` and take its reply, in ``seconds`` all together.

    Raises AgentUnavailable if none answers, PermissionRefused, and ProtocolError for an answer that is none.
    """
    deadline = time.monotonic() + seconds
    try:
        sock = transport.connect(path, deadline)
    except PermissionRefused:
        raise
    except AgentUnavailable:
        raise AgentUnavailable(f"no launcher answers at {path}: is the slot's unit running?") from None
    with sock:
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            transport.send_packet(sock, encode(command))
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data = transport.receive_packet(sock).data
        except TimeoutError:
            raise AgentUnavailable(f"the launcher at {path} did not answer in {seconds:.0f} s") from None
        except OSError as error:
            raise AgentUnavailable(f"the launcher at {path} went away ({error.strerror})") from None
    if not data:
        raise AgentUnavailable(f"the launcher at {path} went away before it answered")
    try:
        return decode_reply(data)
    except ValueError as error:
        raise ProtocolError(f"the launcher at {path} answered something else ({str(error)[:200]})") from None


def _plain(data: bytes) -> object:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("too deep") from None
