"""What an exporter tells anybody about the ranks of its host: no command lines, no processes, no users."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.monitor.families import STATES
from weightcache.status import ErrorInfo, LoadProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightcache.monitor.view import RankView
    from weightcache.status import SetStatus

SCHEMA = 1
MAX_ANSWER = 1 << 20
MAX_NUMBER = 1 << 60


@dataclass(frozen=True, slots=True)
class SetBrief:
    """One weight set; ``fingerprint`` is its fingerprint's digest, and ``group`` the launch that loaded it."""

    id: str
    role: str
    model: str
    version: int
    bytes: int
    fingerprint: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class RankBrief:
    """One rank; ``state`` is one of weightcache.monitor.families.STATES."""

    rank: int
    state: str
    backend: str
    gpu_uuid: str
    model: str
    sets: tuple[SetBrief, ...] = ()
    error: ErrorInfo | None = None
    progress: LoadProgress | None = None


@dataclass(frozen=True, slots=True)
class Brief:
    """The whole answer."""

    schema: int
    ranks: tuple[RankBrief, ...]


def encode(views: Iterable[RankView]) -> bytes:
    """The body of ``GET /status``."""
    whole = Brief(SCHEMA, tuple(rank(view) for view in views))
    return json.dumps(records.to_plain(whole)).encode() + b"\n"


def decode(body: bytes) -> tuple[RankBrief, ...]:
    """The ranks that an exporter answered. Raises ValueError for anything else."""
    try:
        data = json.loads(body)
    except RecursionError:
        raise ValueError("no answer of an exporter") from None
    if isinstance(data, dict) and type(data.get("schema")) is int and data["schema"] != SCHEMA:
        raise ValueError(f"another version of weightcache (schema {data['schema']}, here {SCHEMA})")
    ranks = records.from_plain(Brief, data).ranks
    for number in (number for rank in ranks for number in _numbers(rank)):
        if not 0 <= number < MAX_NUMBER:
            raise ValueError(f"{number:g} is no such number" if abs(number) < 1e300 else "a number is too large")
    return ranks


def _numbers(rank: RankBrief) -> Iterator[float]:
    """All that would be printed as a number."""
    yield rank.rank
    for entry in rank.sets:
        yield from (entry.version, entry.bytes)
    if rank.progress:
        yield from (rank.progress.bytes_done, rank.progress.bytes_total, rank.progress.seconds)


def rank(view: RankView) -> RankBrief:
    """One rank as it is told. Of an agent that does not answer only that, and what its rank is."""
    status, up = view.status, view.agent == "up"
    return RankBrief(
        rank=status.rank,
        state=state(view),
        backend=status.backend,
        gpu_uuid=status.gpu_uuid,
        model=status.model,
        sets=tuple(map(_set, status.sets)) if up else (),
        # The sentence may end with a loader's output, which is not for everybody.
        error=replace(status.error, message="") if up and status.error else None,
        progress=status.progress if up else None,
    )


def state(view: RankView) -> str:
    """The state as metrics tell it, see STATES."""
    if view.agent == "up":
        return view.status.state if view.status.state in STATES else "unknown"
    if view.agent == "closed":
        return "unknown"
    return "down" if view.heard_at and view.status.state != "stopped" else "stopped"


def _set(entry: SetStatus) -> SetBrief:
    return SetBrief(
        entry.id, entry.role, entry.model, entry.version, entry.bytes, entry.fingerprint.digest(), entry.group
    )
