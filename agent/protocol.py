"""The messages between agent, engines, loaders and operators: frozen dataclasses as one strict JSON object each.

Every packet is ``{"protocol": N, "type": TAG, "fds": COUNT, ...fields}``. The protocol number is looked at first, so
that version skew is its own error and never a decoding problem. Which message may be sent where:

    RANK.sock          Hello, Attach, Load; Lead, Join between agents    (activates the agent)
    RANK.status.sock   Status, Watch, Inspect, Renew, Verify, Evict, Drain, Resume    (never activates, never loads)
    a lease            Faulted                                  (on the connection of an answered Attach or Renew)
    RANK.publish.sock  Begin, Progress, Publish, Commit, Abort; Borrow, Rejoin, Anew, Retain    (loaders and donors)
    loader.sock        Run, then Output, Alive, Ended the other way    (the agent asks for one loader)
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from weightcache import records
from weightcache.errors import ProtocolError, VersionSkew, WeightcacheError, from_code
from weightcache.fingerprint import Difference, Fingerprint
from weightcache.status import (
    ArenaInfo as ArenaInfo,
    DrainInfo as DrainInfo,
    ErrorInfo as ErrorInfo,
    Happening as Happening,
    LeaseStatus as LeaseStatus,
    LoadProgress as LoadProgress,
    Measured as Measured,
    RankStatus as RankStatus,
    Refusal as Refusal,
    SetInfo as SetInfo,
    SetStatus as SetStatus,
)

PROTOCOL = 1


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask who is there; never loads. Answer: Welcome."""

    program: str
    version: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Ask for the set that matches ``fingerprint``.

    Answers: any number of Progress while a load runs (at most ``wait_seconds``), then Attached, DonationInvited
    or Failure. The connection stays open afterwards: it is the lease. ``group`` names the launch all of whose ranks
    attach together. ``donate``: this process may publish its own load if the rank is empty.
    ``evict``: drop an unleased set that does not match, where the agent's policy allows it.
    """

    role: str
    group: str
    fingerprint: Fingerprint
    wait_seconds: float
    donate: bool = False
    evict: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Load the configured model now, ``again`` (for operators) where it is resident, too.

    Answers: Progress..., then Loaded or Failure.
    """

    wait_seconds: float
    again: bool = False


@dataclass(frozen=True, slots=True)
class Lead:
    """An agent asks the one that leads its launch to load for all ranks of this host. Answer: Done, once all joined.

    ``asked``: somebody wants this load, whoever uses the weights of other ranks meanwhile; ``again``: all of them anew.
    """

    rank: int
    asked: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """The leader asks a rank to take part in a launch. Answer: Joined.

    ``configuration`` is a digest of what all agents of a launch have to be configured with.

    The connection then lives as long as the launch: the leader sends Progress as a sign of life, and each side says
    how it ended, Done or Failure. The end of the connection ends the launch. ``again``: whatever a rank holds.
    """

    group: str
    asked: bool
    configuration: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the rank's state. Answer: RankReport."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Subscribe: an Observed now, and one at every change, but not more often than every ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Inspect:
    """Map a resident set without an engine (``wcache attach --check``, ``verify``); None: the newest target set."""

    set_id: str | None


@dataclass(frozen=True, slots=True)
class Renew:
    """An engine whose agent was restarted says which set it still maps. The connection is the new lease."""

    set_id: str
    role: str


@dataclass(frozen=True, slots=True)
class Faulted:
    """An attached engine ends because its device failed, and what the device said: its memory may have gone bad."""

    reason: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Recompute the digests of all resident sets on the device. Answers: Progress..., then Verified or Failure."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop one set (or all, with None). Refused while leases are open, unless ``force``."""

    set_id: str | None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop giving out, wait for leases to end (at most ``wait_seconds``), then drop all sets; holds until Resume."""

    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Resume:
    """End a drain."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a publication: ``source`` is ``loader`` or ``donor``; ``token`` proves which load this belongs to.

    Answer: Accepted.
    """

    source: str
    group: str
    token: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Hand over one set. Descriptors: the manifest (a sealed memfd), then one per arena, in order.

    ``contents`` are what all ranks of the launch hold (weightcache.content), in their order; empty where nobody asked.
    """

    set: SetInfo
    contents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """All sets of this load are handed over: make them visible together. Answer: Committed."""

    sets: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The publisher gives up, and why."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """A loader's rank asks for the set that its agent holds already. Answer: Lent, or Failure, and the load goes on."""

    role: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Rejoin:
    """This rank loads what it lost of ``group``; its set has to have this ``content`` again. Answer: Accepted."""

    group: str
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Anew:
    """All ranks load everything anew, so that what this one holds is of no use to them. Answer: Accepted."""


@dataclass(frozen=True, slots=True)
class Retain:
    """What other ranks lost of ``group`` is there again: this one goes on with what it holds. Answer: Committed."""

    group: str


@dataclass(frozen=True, slots=True)
class Run:
    """Run ``command`` with these variables added to the environment. Answers: Output and Alive, then Ended.

    The end of the connection ends the command. ``signs``: whether Alive is wanted, which takes a look at all processes.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    signs: bool = True


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello."""

    version: str
    rank: int
    state: str
    backend: str
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A load is under way."""

    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class Attached:
    """A set. Descriptors: the manifest (a sealed memfd), then one per arena, in order.

    ``group`` names the load that it came from: the ranks of one engine serve sets of one load, or none.
    """

    set_id: str
    role: str
    lease: str
    arenas: tuple[ArenaInfo, ...]
    group: str = ""


@dataclass(frozen=True, slots=True)
class DonationInvited:
    """The rank is empty: load from disk and publish with this token. This connection holds the invitation."""

    token: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configured model is resident."""

    set_id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank takes part: the token for its process of the loader, and the GPU that it serves."""

    token: str
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """Answer to Status."""

    status: RankStatus


@dataclass(frozen=True, slots=True)
class Observed:
    """Answer to Watch: the rank now, and what happened since the last one (in the first one: lately)."""

    status: RankStatus
    events: tuple[Happening, ...]


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease goes on. ``resident`` is false when the restarted agent no longer holds that set."""

    lease: str
    resident: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """All digests are as published."""

    sets: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; ``text`` says what happened."""

    text: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The publication may go on.

    To Begin: whether this rank ``holds`` all sets of a load, which it could retain, and why they must not be replaced.
    """

    holds: bool = False
    in_use: str = ""


@dataclass(frozen=True, slots=True)
class Lent:
    """A resident set, for a rank of a launch that retains it. Descriptors: the manifest, then one per arena, in order.

    ``contents`` are those that all ranks of ``group`` published.
    """

    arenas: tuple[ArenaInfo, ...]
    group: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """The agent holds the descriptors of this set."""

    set_id: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The load is resident; the publisher may exit."""

    set_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """Lines that the command wrote, printable and not empty."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """The command's session did something: processes, CPU ticks, bytes read and written so far."""

    processes: int
    ticks: int
    moved: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The command ended: exit status, or minus the signal number; None with a reason if it could not be started."""

    status: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed: stable code, operator sentence and, for a mismatch, the differing fields."""

    code: str
    message: str
    differences: tuple[Difference, ...] = ()

    def error(self) -> WeightcacheError:
        """The exception this failure stands for."""
        return from_code(self.code, self.message)


Message = (
    Hello | Attach | Load | Lead | Join | Status | Watch | Inspect | Renew | Faulted | Verify | Evict | Drain | Resume
    | Begin | Publish | Commit | Abort | Borrow | Rejoin | Anew | Retain | Run
    | Welcome | Progress | Attached | DonationInvited | Loaded | Joined | RankReport | Observed | Renewed | Verified
    | Done | Accepted | Lent | Published | Committed | Output | Alive | Ended | Failure
)  # fmt: skip


def _tag(cls: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


_BY_TAG: dict[str, type] = {_tag(cls): cls for cls in Message.__args__}


def encode(message: Message, fds: int = 0) -> bytes:
    """The body of a packet that travels with ``fds`` descriptors."""
    body = records.to_plain(message)
    return json.dumps({"protocol": PROTOCOL, "type": _tag(type(message)), "fds": fds, **body}).encode()


def decode(data: bytes, fds: int = 0) -> Message:
    """Decode one packet that came with ``fds`` descriptors. Raises ProtocolError or VersionSkew."""
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise ProtocolError("a packet that is no JSON") from None
    if not isinstance(body, dict):
        raise ProtocolError("a packet that is no JSON object")
    protocol = body.pop("protocol", None)
    if type(protocol) is not int or protocol != PROTOCOL:
        raise VersionSkew(f"the peer speaks protocol {protocol!r}, this side {PROTOCOL}: install the same version")
    announced = body.pop("fds", None)
    if type(announced) is not int or announced != fds:
        raise ProtocolError(f"a packet that announces {announced!r} descriptors and brought {fds}")
    tag = body.pop("type", None)
    cls = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise ProtocolError(f"an unknown message {tag!r}")
    try:
        message: Message = records.from_plain(cls, body, str(tag))
    except records.RecordError as error:
        raise ProtocolError(f"a malformed message: {error}") from None
    return message


def failure(error: WeightcacheError, differences: tuple[Difference, ...] = ()) -> Failure:
    """The Failure message for an exception."""
    return Failure(error.code, error.message, differences)
