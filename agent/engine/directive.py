"""What the launcher (or the loader's parent) tells the plugin inside SGLang, and what the plugin reports back.

The directive is one environment variable, inherited by every process that SGLang spawns: the plugin's own switch.
Without it the plugin does nothing. Reports are packets on the launcher's private SOCK_SEQPACKET socket, one connection
a report. Standard library only: the launcher reads this before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightcache import records, transport
from weightcache.errors import UsageError, WeightcacheError
from weightcache.fingerprint import Difference
from weightcache.standby.messages import Slot

VARIABLE = "WEIGHTCACHE_DIRECTIVE"
TOKEN_VARIABLE = "WEIGHTCACHE_TOKEN"  # noqa: S105
"""The load's one-time token, apart from the directive so that the directive may be logged: one for every agent of the
launch, or ``AGENT=TOKEN,AGENT=TOKEN``."""
UNPROVEN_VARIABLE = "WEIGHTCACHE_UNPROVEN"
"""Set for a loader whose weights are for a comparison: methods without evidence may be published."""


@dataclass(frozen=True, slots=True)
class Directive:
    """``purpose`` engine: serve, attach if possible. ``purpose`` loader: load, publish to ``sockets``, exit.

    ``sockets`` maps a GPU UUID (backend cuda) or ``rank:N`` (backend host) to the path of that rank's RANK.sock.
    ``on_mismatch``: what an engine does when it cannot attach. ``from_disk``: not empty when the launcher has already
    decided against attaching, with the reason. ``explain``: stop after the decision. ``donate``: an engine may publish
    its own load to an empty agent. ``group`` names this launch. ``inventory`` is a directory that an engine writes the
    inventory of its loaded models to (weightcache.parity). ``unproven`` says whether a loader refuses methods without
    evidence, checks what it loaded (weightcache.engine.selfcheck) or allows them (for a comparison that follows).
    ``anew``: a loader's ranks load whatever they hold already.
    ``levers`` are what may shorten an engine's start (weightcache.launch.arguments.LEVERS); ``warmed`` is a file that
    exists when the same start succeeded before (weightcache.engine.warmup). ``trace`` is the file that the engine's
    processes append the phases of this start to (weightcache.starts.record). ``listener``: the launcher holds the HTTP
    port, and gives its socket to whoever asks with ListenerWanted (weightcache.engine.listener). ``slot``: the engine
    is one of two (weightcache.standby), and takes orders.
    """

    purpose: Literal["engine", "loader"]
    backend: Literal["host", "cuda"]
    sockets: dict[str, str]
    group: str
    on_mismatch: Literal["fallback", "evict", "error"] = "fallback"
    wait_seconds: float = 0.0
    donate: bool = False
    from_disk: str = ""
    explain: bool = False
    report: str = ""
    arena_bytes: int = 0
    inventory: str = ""
    unproven: Literal["refuse", "check", "allow"] = "refuse"
    anew: bool = False
    levers: tuple[str, ...] = ()
    warmed: str = ""
    trace: str = ""
    listener: bool = False
    slot: Slot | None = None

    def environment(self) -> dict[str, str]:
        """The variables that carry this directive."""
        return {VARIABLE: json.dumps(records.to_plain(self))}


def read(environment: Mapping[str, str] | None = None) -> Directive | None:
    """The directive of this process, or None. Raises UsageError when it is malformed."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        return None
    try:
        return records.from_plain(Directive, json.loads(text), VARIABLE)
    except ValueError as error:
        raise UsageError(f"{VARIABLE} is malformed: {error}") from None


def token_for(agent: int, environment: Mapping[str, str] = os.environ) -> str:
    """The token that ``agent``, by the number in its socket's name, gave this launch; empty where there is none.

    Raises UsageError when other agents gave theirs, and this one did not.
    """
    text = environment.get(TOKEN_VARIABLE, "")
    if "=" not in text:
        return text
    tokens = dict(entry.split("=", 1) for entry in text.split(",") if "=" in entry)
    if (token := tokens.get(str(agent))) is None:
        raise UsageError(f"{TOKEN_VARIABLE} holds no token for agent {agent}")
    return token


@dataclass(frozen=True, slots=True)
class PluginReady:
    """The plugin's hooks took in one of the engine's processes. ``process`` is main or scheduler."""

    pid: int
    process: str
    sglang_version: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How one rank gets its weights, and why.

    ``outcome``: attached, donated (disk, then published), disk, refused (ends the engine), failed (after the decision:
    the launcher starts again from disk) or explained. ``milliseconds`` holds the steps that were timed: observe,
    connect, receive, map, private (copies), build, bind, collective. ``mapped_bytes`` is the size of the arenas,
    ``private_bytes`` what this engine copied.
    """

    rank: int
    role: str
    outcome: Literal["attached", "donated", "disk", "refused", "failed", "explained"]
    code: str = ""
    message: str = ""
    differences: tuple[Difference, ...] = ()
    set_id: str = ""
    tensors: int = 0
    arenas: int = 0
    mapped_bytes: int = 0
    private_bytes: int = 0
    milliseconds: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Milestone:
    """The server's main process reached a point of its start (weightcache.starts.reading): it serves, or a token came.

    ``at``: seconds on CLOCK_MONOTONIC.
    """

    pid: int
    name: Literal["warm-up token", "serving", "first token"]
    at: float


@dataclass(frozen=True, slots=True)
class ListenerWanted:
    """The server's main process is about to listen; the answer on the same connection is a packet with the socket."""

    pid: int


Report = PluginReady | Decision | Milestone | ListenerWanted


_REPORTS: tuple[type[Report], ...] = (PluginReady, Decision, Milestone, ListenerWanted)


def encode_report(report: Report) -> bytes:
    """One packet."""
    return records.to_tagged(report)


def decode_report(data: bytes) -> Report:
    """Decode one packet; raises ValueError when it is malformed."""
    return records.from_tagged(_REPORTS, data)


def send_report(directive: Directive, report: Report, timeout: float = 5.0) -> None:
    """Tell the launcher, if one listens; a launcher that went away never stops an engine."""
    if not directive.report:
        return
    with contextlib.suppress(WeightcacheError, OSError):
        sock = transport.connect(directive.report, time.monotonic() + timeout)
        with contextlib.closing(sock):
            sock.settimeout(timeout)
            transport.send_packet(sock, encode_report(report))
