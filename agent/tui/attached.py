"""The engines of a rank: one process may lease several of its sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache.tui.cells import safe

if TYPE_CHECKING:
    from weightcache.protocol import LeaseStatus, RankStatus, SetStatus


@dataclass(frozen=True, slots=True)
class Attached:
    """One process, its first lease, and the sets that it uses; ``orphan``: a set that it maps is gone."""

    lease: LeaseStatus
    sets: tuple[SetStatus, ...]
    orphan: bool

    @property
    def uses(self) -> str:
        """The sets by their roles and versions."""
        names = [f"{safe(entry.role)} v{entry.version}" for entry in self.sets]
        return ", ".join(names + ["gone"] * self.orphan)


def attached(status: RankStatus) -> list[Attached]:
    """The engines in the order of their sets; those of sets that are gone at the end."""
    leases: dict[int, LeaseStatus] = {}
    used: dict[int, list[SetStatus]] = {}
    for entry in status.sets:
        for lease in entry.leases:
            leases.setdefault(lease.pid, lease)
            used.setdefault(lease.pid, []).append(entry)
    for lease in status.orphans:
        leases.setdefault(lease.pid, lease)
    gone = {lease.pid for lease in status.orphans}
    return [Attached(lease, tuple(used.get(pid, ())), pid in gone) for pid, lease in leases.items()]
