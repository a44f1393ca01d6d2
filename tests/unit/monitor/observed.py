"""Ranks as an observer sees them, for tests of the metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.test_loader import fingerprint
from weightcache.monitor.gpus import Gpu
from weightcache.monitor.snapshot import Snapshot
from weightcache.monitor.view import RankView
from weightcache.protocol import DrainInfo, ErrorInfo, LeaseStatus, LoadProgress, Measured, RankStatus, SetStatus
from weightcache.standby.listing import EngineView, SlotView
from weightcache.standby.messages import Process, Role
from weightcache.standby.status import Promotion, SlotStatus

NOW = 1_800_000_000.0
STARTED = NOW - 3600
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
GPUS = {UUID: Gpu(3, "NVIDIA H200", "00000000:18:00.0")}
ATTACHES = (0, 2, 5, 1, 0, 0, 0, 0, 0, 0, 0, 1)


def lease(pid: int = 4711) -> LeaseStatus:
    return LeaseStatus(f"{pid:012x}", pid, 1000, "chat.service", "python -m sglang.launch_server", NOW - 60)


def weight_set(**changes: Any) -> SetStatus:
    base = SetStatus(
        id="6ee3da0a074c",
        role="target",
        model="/srv/models/llama",
        revision="0123456789abcdef0123456789abcdef01234567",
        version=4,
        bytes=16_400_000_000,
        arenas=16,
        tensors=291,
        fingerprint=fingerprint(),
        digest="fedcba9876543210fedcba9876543210",
        published_at=NOW - 3000,
        load_seconds=12.5,
        bytes_read=16_390_000_000,
        leases=(lease(),),
    )
    return dataclasses.replace(base, **changes)


def status(**changes: Any) -> RankStatus:
    """A rank that is ready, with everything that can be told of it."""
    base = RankStatus(
        rank=0,
        state="ready",
        backend="cuda",
        gpu_uuid=UUID,
        version="0.1.0",
        pid=99,
        uptime_seconds=3600.0,
        model="/srv/models/llama",
        sets=(weight_set(),),
        orphans=(lease(1),),
        progress=LoadProgress("loading", 5, 10, 2.5),
        error=ErrorInfo("checkpoint", "the checkpoint is missing"),
        drained=DrainInfo(0, NOW - 100),
        kept="store",
        counts={"leased": 7, "refused:mismatch": 2, "refused:strange": 3, "verification-failed:damaged": 1},
        measured=Measured(
            STARTED, NOW - 500, ATTACHES, 4.5, {"loader:published": 2, "donor:failed": 1}, {"loader": 30.0}
        ),
    )
    return dataclasses.replace(base, **changes)


def up(**changes: Any) -> RankView:
    """A rank whose agent answers."""
    return RankView(status(**changes), "up", None, NOW)


def down(**changes: Any) -> RankView:
    """A rank whose agent does not answer any more."""
    return RankView(status(**changes), "down", ErrorInfo("no-agent", "no agent answers"), NOW - 60)


def slot(slot: str, role: Role, **changes: Any) -> SlotView:
    """A slot of the engine chat that was promoted three times."""
    promotions = (Promotion(NOW - 900, 0.2, "start"), Promotion(NOW - 600, 0.56, "death", {"map": 0.3}))
    base = SlotStatus(
        engine="chat",
        slot=slot,
        role=role,
        since=NOW - 600,
        launcher=Process(50, 1),
        restarts=2,
        promotions=promotions,
        promoted={"start": 1, "death": 2},
    )
    return SlotView(slot, role, dataclasses.replace(base, **changes), "")


def pair(*slots: SlotView, **changes: Any) -> EngineView:
    """An engine with a standby."""
    found = slots or (slot("a", "active"), slot("b", "standby", promotions=(), promoted={}))
    return dataclasses.replace(EngineView("chat", "0.0.0.0:30000", "/srv/models/llama", 0, False, "", found), **changes)


def snapshot(*ranks: RankView, standby: tuple[EngineView, ...] = ()) -> Snapshot:
    """All there is on a host."""
    return Snapshot(NOW, "host", "0.1.0", "", "", ranks, (), (), (), standby)
