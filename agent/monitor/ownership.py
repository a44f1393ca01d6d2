"""Who owns a device's memory: weights, engines, others; also when no process owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import Device, Snapshot


@dataclass(frozen=True, slots=True)
class Ownership:
    """Bytes of one device; the four parts add up to ``total``.

    ``weights``: arenas of resident sets, whoever holds them (nvidia-smi shows them under no process). ``engines``: what
    attached engines have besides. ``other``: everybody else, and what the driver keeps for itself.
    """

    total: int
    weights: int
    engines: int
    other: int
    free: int


def ownership(snapshot: Snapshot, device: Device) -> Ownership:
    """Split ``device``'s memory. What the agents hold is exact; the rest is what the device's driver says.

    What an agent that is down held last counts too: the weights outlive it.
    """
    ranks = [rank.status for rank in snapshot.ranks if rank.status.gpu_uuid == device.uuid]
    used = min(device.used, device.total)
    weights = min(sum(entry.bytes for rank in ranks for entry in rank.sets), used)
    pids = {lease.pid for rank in ranks for entry in rank.sets for lease in entry.leases}
    pids |= {lease.pid for rank in ranks for lease in rank.orphans}
    own = sum(process.bytes or 0 for process in device.processes if process.pid in pids)
    engines = min(own, used - weights)
    return Ownership(device.total, weights, engines, used - weights - engines, device.total - used)
