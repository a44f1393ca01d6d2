"""Snapshots with a frozen clock, a host name and versions; and a source that a test advances."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from weightcache.fingerprint import Fingerprint
from weightcache.monitor.snapshot import Device, DeviceProcess, Engine, RankEvent, Snapshot
from weightcache.monitor.view import RankView
from weightcache.protocol import (
    DrainInfo,
    ErrorInfo,
    Happening,
    LeaseStatus,
    LoadProgress,
    RankStatus,
    Refusal,
    SetStatus,
)
from weightcache.standby.listing import EngineView, SlotView
from weightcache.standby.messages import Process, Role
from weightcache.standby.status import Promotion, SlotStatus

NOW = 1_764_513_000.0
"""2025-11-30 14:30:00 UTC."""

GIB = 2**30
MODEL = "/srv/models/llama-3.1-70b-instruct-fp8"
LAUNCH = f"/opt/sglang/bin/python -m sglang.launch_server --model-path {MODEL} --tp-size 8 --port 30000"


def fingerprint(**changes: Any) -> Fingerprint:
    base = Fingerprint(
        schema=1,
        role="target",
        model_path=MODEL,
        model_arch="LlamaForCausalLM",
        revision="",
        checkpoint="5f0c7a1e9b3d4c2a8e6f1b7d9c3a5e80",
        override_args="{}",
        load_format="auto",
        tp_size=8,
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
        dp_size=1,
        ep_size=1,
        ep_rank=0,
        attention_dp=1,
        attention_cp_size=1,
        moe_dp_size=1,
        quant_method="fp8",
        quant_config_hash="b1946ac92492d2347c6235b4d2611184",
        dtype="torch.bfloat16",
        device="cuda",
        device_capability="9.0",
        torch_version="2.9.1+cu130",
        sglang_version="0.5.23",
        kernel_versions="sgl-kernel 0.3.21, flashinfer 0.6.1",
        backends="attention=fa3 moe=triton fp8_gemm=deep_gemm",
        environment="",
        plugins="",
    )
    return dataclasses.replace(base, **changes)


def lease(pid: int = 41700, **changes: Any) -> LeaseStatus:
    base = LeaseStatus(
        lease=f"l{pid}",
        pid=pid,
        uid=0,
        unit="sglang-chat.service",
        command="/opt/sglang/bin/python -m sglang.launch_server --model-path /srv/models/llama --port 30000",
        since=NOW - 5400,
    )
    return dataclasses.replace(base, **changes)


def weight_set(**changes: Any) -> SetStatus:
    made = changes.get("fingerprint", fingerprint())
    base = SetStatus(
        id="6ee3da0a074c",
        role="target",
        model=MODEL,
        revision="",
        version=1,
        bytes=16_400_000_000,
        arenas=16,
        tensors=723,
        fingerprint=made,
        digest=made.digest(),
        published_at=NOW - 7200,
        load_seconds=21.4,
        bytes_read=17_000_000_000,
        leases=(lease(),),
    )
    return dataclasses.replace(base, **changes)


def uuid(rank: int) -> str:
    return f"GPU-{rank}1234567-89ab-cdef-0123-456789abcde{rank}"


def status(rank: int = 0, state: str = "ready", **changes: Any) -> RankStatus:
    base = RankStatus(
        rank=rank,
        state=state,
        backend="cuda",
        gpu_uuid=uuid(rank),
        version="0.1.0",
        pid=1200 + rank,
        uptime_seconds=260_000.0,
        model=MODEL,
        sets=(weight_set(),) if state in ("ready", "degraded") else (),
        orphans=(),
        progress=LoadProgress("loading", 7_052_000_000, 16_400_000_000, 9.0) if state == "loading" else None,
        error=ErrorInfo("load-failed", "the loader was killed by signal 9") if state == "failed" else None,
        drained=DrainInfo(0, NOW - 600) if state == "drained" else None,
        kept="store",
        counts={"leased": 3, "set-published": 1, "state-changed": 2},
    )
    return dataclasses.replace(base, **changes)


def refusal(**changes: Any) -> Refusal:
    """An engine that wanted other weights."""
    base = Refusal(
        at=NOW - 300,
        pid=51300,
        uid=0,
        unit="",
        command="python -m sglang.launch_server --dtype float16",
        role="target",
        code="mismatch",
        message="rank 0 holds other weights than this engine needs (dtype, quant_method)",
        differences=(),
    )
    return dataclasses.replace(base, **changes)


def view(found: RankStatus | None = None, **changes: Any) -> RankView:
    base = RankView(found or status(), "up", None, NOW - 1)
    return dataclasses.replace(base, **changes)


def down(found: RankStatus | None = None, ago: float = 200, message: str = "") -> RankView:
    reason = ErrorInfo("no-agent", message or "no agent listens on /run/weightcache/0.status.sock")
    return RankView(found or status(), "down", reason, NOW - ago if ago else 0.0)


def device(rank: int = 0, processes: Iterable[DeviceProcess] | None = None, **changes: Any) -> Device:
    own = (DeviceProcess(41700, "python", 88_000_000_000),) if processes is None else tuple(processes)
    base = Device(
        uuid=uuid(rank),
        index=rank,
        name="NVIDIA H200",
        total=150_754_820_096,
        used=105_100_000_000,
        free=45_654_820_096,
        processes=own,
    )
    return dataclasses.replace(base, **changes)


def event(serial: int, name: str, text: str, *, rank: int = 0, level: str = "info", ago: float = 60) -> RankEvent:
    return RankEvent(rank, Happening(serial, NOW - ago, name, level, text))


EVENTS = (
    event(1, "load-began", "load begins (loader)", ago=7221),
    event(2, "set-published", f"set 6ee3da0a074c of {MODEL} is resident", ago=7200),
    event(3, "state-changed", "ready", ago=7200),
    event(4, "leased", "pid 41700 leases set 6ee3da0a074c", ago=5400),
    event(
        5,
        "refused",
        "pid 51300 was refused: rank 0 holds other weights than this engine needs (dtype, quant_method)",
        ago=300,
    ),
)


def snapshot(*ranks: RankView, **changes: Any) -> Snapshot:
    base = Snapshot(
        at=NOW,
        host="gpu07",
        version="0.1.0",
        driver="580.95.05",
        problem="",
        ranks=ranks,
        devices=tuple(device(rank.status.rank) for rank in ranks),
        engines=(Engine(41700, NOW - 5460, 6_100_000_000, LAUNCH, 12, 3),),
        events=EVENTS if ranks else (),
    )
    return dataclasses.replace(base, **changes)


def ready() -> Snapshot:
    return snapshot(view())


def fleet() -> Snapshot:
    """8 ranks with 3 sets and 20 engines each."""
    views = []
    devices = []
    engines: list[Engine] = []
    for rank in range(8):
        sets = []
        processes: list[DeviceProcess] = []
        for n, role in enumerate(("target", "draft-0", "draft-1")):
            pids = range(40_000 + 1000 * rank + 10 * n, 40_000 + 1000 * rank + 10 * n + (7 if n < 2 else 6))
            leases = tuple(
                lease(pid, unit=f"sglang-{role}@{pid % 10}.service", since=NOW - 60 * (pid % 10 + 1)) for pid in pids
            )
            made = fingerprint(tp_rank=rank, role=role)
            sets.append(
                weight_set(
                    id=f"{rank}{n}e3da0a074c",
                    role=role,
                    leases=leases,
                    fingerprint=made,
                    digest=made.digest(),
                    bytes=16_400_000_000 // (3 * n + 1),
                    version=n + 1,
                )
            )
            processes += [DeviceProcess(pid, "python", 3_900_000_000) for pid in pids]
            engines += [Engine(pid, NOW - 100, 3_000_000_000 + pid, "", pid % 5, 0) for pid in pids]
        views.append(view(status(rank, sets=tuple(sets))))
        devices.append(device(rank, processes))
    events = tuple(
        event(i, "leased", f"pid {40_000 + i} leases a set", rank=i % 8, ago=1000 - i) for i in range(1, 190)
    )
    return snapshot(*views, devices=tuple(devices), engines=tuple(engines), events=events)


HOSTILE = (
    "/srv/[red]x[/red]/\x1b[2J\u202egnp.exe/\u200b\u0301\ufe0f" + "模型" * 30 + "[@click=app.quit]q[/]" + "A" * 4000
)


def hostile() -> Snapshot:
    bad = weight_set(
        id=HOSTILE[:40],
        role=HOSTILE,
        model=HOSTILE,
        revision=HOSTILE,
        digest=HOSTILE,
        suspect=HOSTILE,
        fingerprint=fingerprint(model_path=HOSTILE, environment="\n\r\t\0" + HOSTILE),
        leases=(lease(unit=HOSTILE, command=HOSTILE, lease=HOSTILE),),
    )
    worse = status(
        state=HOSTILE,
        sets=(bad,),
        model=HOSTILE,
        version=HOSTILE,
        backend=HOSTILE,
        kept=HOSTILE,
        error=ErrorInfo(HOSTILE, HOSTILE),
        counts={HOSTILE: 1},
        progress=LoadProgress(HOSTILE, 1, 2, 3.0),
    )
    return snapshot(
        view(worse),
        host=HOSTILE[:70],
        engines=(Engine(41700, NOW - 5460, 6_100_000_000, HOSTILE, 12, 3),),
        driver="[b]580[/b]\x1b[31m",
        problem=HOSTILE,
        devices=(device(name=HOSTILE, processes=[DeviceProcess(41700, HOSTILE, 88_000_000_000)]),),
        events=(event(1, HOSTILE, HOSTILE, level=HOSTILE),),
        standby=(pair(slot("a", "active", problem=HOSTILE), engine=HOSTILE, model=HOSTILE, listen=HOSTILE),),
    )


class Played:
    """A source whose snapshots a test exchanges."""

    def __init__(self, first: Snapshot) -> None:
        self.now = first
        self.paces: list[float] = []
        self.asked = 0

    def snapshot(self) -> Snapshot:
        self.asked += 1
        return self.now

    def pace(self, seconds: float) -> None:
        self.paces.append(seconds)

    def close(self) -> None:
        pass


def loading() -> Snapshot:
    return snapshot(view(status(state="loading")), engines=(), devices=(device(0, ()),))


def mixed() -> Snapshot:
    """One rank in each state that an operator has to tell apart."""
    lost = status(7, kept="lost", orphans=(lease(51300, unit="", command="python3 -m old"),))
    sick = status(3, "degraded", error=ErrorInfo("damaged", "set 6ee3da0a074c: arena 3 does not match its digest"))
    closed = ErrorInfo("permission", "the socket /run/weightcache/10.status.sock is not for this user")
    return snapshot(
        view(status(0)),
        view(status(1, "loading")),
        view(status(2, "drained")),
        view(sick),
        view(status(4, "failed")),
        down(status(5), message="no agent listens on /run/weightcache/5.status.sock"),
        view(status(6), heard_at=NOW - 14),
        view(lost),
        down(status(8, "stopped", sets=()), ago=3700),
        down(status(9, "unknown", model="", sets=(), gpu_uuid="", version="", pid=0), ago=0),
        view(status(10, "unknown", sets=()), agent="closed", heard_at=0.0, reason=closed),
    )


def empty() -> Snapshot:
    return snapshot(problem="NVML: the driver library is missing", driver="", engines=(), events=())


def degraded() -> Snapshot:
    error = ErrorInfo("damaged", "set 6ee3da0a074c: arena 3 does not match its digest; wcache evict && wcache load")
    sick = weight_set(suspect="engine 41700 ended by signal 11 soon after it attached", leases=())
    happened = (*EVENTS, event(6, "verification-failed", error.message, level="error", ago=30))
    return snapshot(view(status(0, "degraded", sets=(sick,), error=error)), engines=(), events=happened)


def agent_down() -> Snapshot:
    return snapshot(down(), engines=())


def stale() -> Snapshot:
    return snapshot(view(heard_at=NOW - 14))


def drained() -> Snapshot:
    free = device(0, (), used=600_000_000, free=150_154_820_096)
    return snapshot(view(status(0, "drained")), devices=(free,), engines=())


def parked() -> Snapshot:
    """Weights that no process owns."""
    used = device(0, (), used=17_000_000_000, free=133_754_820_096)
    return snapshot(view(status(0, sets=(weight_set(leases=()),))), devices=(used,), engines=())


def slot(slot: str, role: Role, engine: str = "chat", problem: str = "", **changes: Any) -> SlotView:
    """What the launcher of a slot wrote down."""
    pid = (41700 if slot == "a" else 52800) + 100 * (engine != "chat")
    base = SlotStatus(
        engine=engine,
        slot=slot,
        role=role,
        since=NOW - 5300,
        launcher=Process(pid - 2, 1),
        main=Process(pid - 1, 2),
        ranks=(Process(pid, 3),),
        model=MODEL,
        listen="0.0.0.0:30000",
        problem=problem,
        memory=88_000_000_000 if role == "active" else 6_400_000_000,
        promotions=(
            Promotion(NOW - 90_000, 0.2, "start"),
            Promotion(NOW - 5300, 0.214, "death", {"lock": 0.001, "fence": 0.02, "map": 0.17, "accept": 0.004}),
        ),
        promoted={"start": 1, "death": 1},
    )
    return SlotView(slot, role, dataclasses.replace(base, **changes), problem)


def pair(*slots: SlotView, **changes: Any) -> EngineView:
    """An engine with its slots, by default one that is active and one that stands by."""
    found = slots or (slot("a", "active"), slot("b", "standby", since=NOW - 40, restarts=2, promotions=(), promoted={}))
    base = EngineView("chat", "0.0.0.0:30000", MODEL, 0, False, "", found)
    return dataclasses.replace(base, **changes)


def two_slots() -> Snapshot:
    return snapshot(view(), standby=(pair(),))


def troubled_slots() -> Snapshot:
    """A slot that starts again and again, a parked engine, one whose file is not valid, and one that is hidden."""
    failing = slot(
        "b", "starting", problem="rank 0 has ended by signal 9", restarts=17, main=None, ranks=(), memory=None
    )
    resting = pair(
        slot("a", "parked", "draft", memory=None),
        slot("b", "parked", "draft"),
        engine="draft",
        parked=True,
        priority=-1,
    )
    broken = pair(
        SlotView("a", "down", None, ""),
        SlotView("b", "down", None, ""),
        engine="odd",
        model="",
        listen="",
        problem="/etc/weightcache/engines/odd.toml: engine.arguments: --port is missing",
    )
    unreadable = "this user may not open /run/weightcache/engines/shy-a.json (is it in the group that owns the file?)"
    hidden = pair(
        SlotView("a", "down", None, unreadable), SlotView("b", "down", None, unreadable), engine="shy", model=""
    )
    return snapshot(view(), standby=(pair(slot("a", "active"), failing), resting, broken, hidden))
