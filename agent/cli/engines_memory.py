"""What the ranks of each slot take on GPUs now, as the driver counts it: their own bytes, not the shared weights."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from weightcache.monitor.nvml import Nvml, Reading

if TYPE_CHECKING:
    from weightcache.standby.listing import EngineView, SlotView

DRIVER_SECONDS = 5.0
"""A driver that hangs is not waited for."""


def measured(views: tuple[EngineView, ...]) -> tuple[EngineView, ...]:
    """The same, with the memory of each slot's processes where the driver tells it."""
    uuids = sorted({gpu for view in views for slot in view.slots for gpu in _gpus(slot)})
    if not uuids:
        return views
    used: Counter[int] = Counter()
    for device in _read(uuids).devices:
        for process in device.processes:
            used[process.pid] += process.bytes or 0
    return tuple(replace(view, slots=tuple(_with(slot, used) for slot in view.slots)) for view in views)


def _gpus(slot: SlotView) -> tuple[str, ...]:
    gpus = slot.status.gpus if slot.status is not None else ()
    return tuple(gpu for gpu in gpus if gpu.startswith(("GPU-", "MIG-")))


def _with(slot: SlotView, used: Counter[int]) -> SlotView:
    if slot.status is None or not _gpus(slot):
        return slot
    pids = [rank.pid for rank in slot.status.ranks if rank.pid in used]
    memory = sum(used[pid] for pid in pids) if pids else None
    return replace(slot, status=replace(slot.status, memory=memory))


def _read(uuids: list[str]) -> Reading:
    found: list[Reading] = []
    thread = threading.Thread(target=lambda: found.append(Nvml().read(uuids, str)), daemon=True)
    thread.start()
    thread.join(DRIVER_SECONDS)
    return found[0] if found else Reading()
