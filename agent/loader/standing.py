"""Do the ranks of a launch bring back what some of them lost, or do all load anew? Each says where it stands.

All ranks hear the same and decide alike: no rank goes on with what it holds unless all others do, or get back exactly
what they lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from weightcache import records
from weightcache.errors import InUse, LoadFailed


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank before a load: it ``holds`` weights of ``group`` (and knows all ranks' contents), lost its, or cannot go
    on with what it has, for the reason ``why``. ``in_use`` says why its weights must not be replaced, if that is so.
    """

    kind: Literal["holds", "lost", "anew"]
    group: str = ""
    contents: tuple[str, ...] = ()
    why: str = ""
    in_use: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank has now: the content that it loaded or holds; empty where that could not be had, and ``why``."""

    content: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks do. ``group`` is the load that those without weights rejoin; empty: all load anew, and ``why``.
    ``in_use`` says which rank's weights must not be replaced, if there is one.
    """

    group: str = ""
    contents: tuple[str, ...] = ()
    why: str = ""
    in_use: str = ""

    def require_room(self, why: str) -> None:
        """Raise InUse where all would have to load anew because of ``why``, and may not."""
        if self.in_use:
            raise InUse(f"{self.in_use} ({why})")


Said = Standing | Loaded
T = TypeVar("T", Standing, Loaded)


def decide(standings: Sequence[Standing]) -> Plan:
    """The plan of a launch whose ranks stand so, in their order. Raises InUse: all have to load anew, and may not."""
    plan = _decide(standings)
    using = next((f"rank {rank}: {standing.in_use}" for rank, standing in enumerate(standings) if standing.in_use), "")
    plan = replace(plan, in_use=using)
    if not plan.group:
        plan.require_room(plan.why)
    return plan


def _decide(standings: Sequence[Standing]) -> Plan:
    for rank, standing in enumerate(standings):
        if standing.kind == "anew":
            return Plan(why=f"rank {rank}: {standing.why}")
    holders = [(rank, standing) for rank, standing in enumerate(standings) if standing.kind == "holds"]
    if not holders:
        return Plan(why="no rank holds weights of a load")
    first, model = holders[0]
    for rank, standing in holders:
        if (standing.group, standing.contents) != (model.group, model.contents):
            return Plan(why=f"ranks {first} and {rank} hold weights of different loads")
    if len(model.contents) != len(standings):
        return Plan(why=f"rank {first} holds weights of a load of {len(model.contents)} ranks")
    return Plan(model.group, model.contents)


def misfit(plan: Plan, loaded: Sequence[Loaded]) -> str:
    """Why the ranks' contents are not those of the plan's group; an empty text if they are."""
    for rank, (found, expected) in enumerate(zip(loaded, plan.contents, strict=True)):
        if found.content != expected:
            return f"rank {rank}: {found.why or 'what it loaded is not what it had lost'}"
    return ""


def encode(said: Said) -> bytes:
    """For the other ranks."""
    return records.to_tagged(said)


def standings(heard: Sequence[bytes]) -> list[Standing]:
    """Decode what all ranks said of themselves before they load. Raises LoadFailed for anything else."""
    return [_decoded(data, rank, Standing) for rank, data in enumerate(heard)]


def contents(heard: Sequence[bytes]) -> list[Loaded]:
    """Decode what all ranks say that they have. Raises LoadFailed for anything else."""
    return [_decoded(data, rank, Loaded) for rank, data in enumerate(heard)]


def _decoded(data: bytes, rank: int, kind: type[T]) -> T:
    try:
        return records.from_tagged((kind,), data)
    except ValueError as error:
        raise LoadFailed(f"rank {rank} of the launch said something else than {kind.__name__}: {error}") from None
