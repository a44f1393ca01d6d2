"""What a rank is, holds and does, as values: the parts of the protocol's messages and of the status file."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightcache.fingerprint import Difference, Fingerprint

ATTACH_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Attaches are counted by how many seconds they took at most."""


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """One arena: physical size and used part in bytes, and the digest of the used part (32 hex digits)."""

    bytes: int
    used: int
    digest: str


@dataclass(frozen=True, slots=True)
class SetInfo:
    """What the publisher says of a weight set. ``role`` is ``target`` or ``draft-N``; times are seconds."""

    role: str
    model: str
    revision: str
    fingerprint: Fingerprint
    arenas: tuple[ArenaInfo, ...]
    tensors: int
    load_seconds: float
    bytes_read: int


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One attached engine. ``since`` is seconds since the epoch; ``unit`` is its systemd unit, or empty."""

    lease: str
    pid: int
    uid: int
    unit: str
    command: str
    since: float


@dataclass(frozen=True, slots=True)
class SetStatus:
    """A resident weight set. ``version`` counts from 1 for each role; ``suspect`` says why it is being examined.

    ``group`` names the load that it came from, the same on all ranks of one launch.

    ``leases`` are all ``leases_total``, or the newest of more than a packet carries.
    """

    id: str
    role: str
    model: str
    revision: str
    version: int
    bytes: int
    arenas: int
    tensors: int
    fingerprint: Fingerprint
    digest: str
    published_at: float
    load_seconds: float
    bytes_read: int
    leases: tuple[LeaseStatus, ...]
    suspect: str = ""
    leases_total: int = 0
    group: str = ""

    @property
    def unnamed(self) -> int:
        """How many leases there are beside ``leases``."""
        return max(self.leases_total - len(self.leases), 0)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Where a load stands: phase is importing, loading, packing or publishing; bytes_total 0 means unknown."""

    phase: str
    bytes_done: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The stable code and the operator sentence of an error."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """Who drained the rank (uid), and when (seconds since the epoch)."""

    uid: int
    at: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that asked for weights and did not get them; ``at`` is seconds since the epoch.

    ``differences`` are those of a mismatch: the resident value, the engine's, and what serving it anyway would mean.
    """

    at: float
    pid: int
    uid: int
    unit: str
    command: str
    role: str
    code: str
    message: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an agent counted and timed since ``started_at`` (seconds since the epoch, like ``leased_at``; 0: not said).

    ``leased_at`` is when the last lease ended; before there was one, the agent's start. ``attaches`` are those that
    waited for no load, one number for each of ATTACH_BOUNDS and one for longer ones; all took ``attach_seconds``.
    ``loads`` are counted by source and result ("loader:published", "loader:failed", "donor:given-up"), and
    ``load_seconds`` is what the published ones of a source took.
    """

    started_at: float = 0.0
    leased_at: float = 0.0
    attaches: tuple[int, ...] = ()
    attach_seconds: float = 0.0
    loads: dict[str, int] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank, as ``wcache status --json`` prints it.

    ``kept`` says who holds the descriptors besides the engines: ``process`` (the agent alone), ``store`` (the service
    manager too) or ``lost`` (the service manager dropped them; they are being stored again). ``counts`` says how often
    each event of the journal happened since this agent started; refusals and failed verifications are counted by code
    ("refused:mismatch", "verification-failed:damaged"). ``refusals`` are the latest ones, oldest first.
    """

    rank: int
    state: str
    backend: str
    gpu_uuid: str
    version: str
    pid: int
    uptime_seconds: float
    model: str
    sets: tuple[SetStatus, ...]
    orphans: tuple[LeaseStatus, ...]
    progress: LoadProgress | None
    error: ErrorInfo | None
    drained: DrainInfo | None
    kept: str = "process"
    counts: dict[str, int] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    measured: Measured = Measured()


@dataclass(frozen=True, slots=True)
class Happening:
    """One event: its number in the agent's life, when (seconds since the epoch), the journal's name, and words."""

    serial: int
    at: float
    event: str
    level: str
    text: str
