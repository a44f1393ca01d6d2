"""The load of a layout, measured: seconds to ready, loaders, bytes, and what is left in memory afterwards."""

from __future__ import annotations

import psutil

from tests.gpu import rig
from tests.gpu.deployed import Deployed
from tests.gpu.notes import Notes
from tests.gpu.rig import MIB
from tests.gpu.watch import LoaderWatch
from tests.support import pagecache
from weightcache.checkpoint import weight_files

BESIDE_BYTES = 32 * MIB
"""What the driver may keep on a GPU beside the arenas."""
AGENT_BYTES = 40e6


def load(part: Deployed, notes: Notes, cold: bool, alone: bool) -> None:
    """Load one model. ``cold``: from the disk; ``alone``: wait until no process is left on these GPUs."""
    layout, name, files = part.layout, part.name, weight_files(part.model)
    if cold:
        pagecache.drop(files)
    with LoaderWatch([agent.keeper for agent in part.agents]) as watch:
        ready = part.load(notes.left(300))
        if alone:
            settle(layout.gpus, notes)
    reports = [agent.report() for agent in part.agents]
    held = [report.sets[0] for report in reports]
    rss = [psutil.Process(agent.pid).memory_info().rss for agent in part.agents]
    rows = {
        "ready by rank, s": ready,
        "loaders": len(watch.loaders),
        "bytes_read by rank": [entry.bytes_read for entry in held],
        "the loaders' rchar, bytes": watch.called,
        f"the loaders' read_bytes, from a {'cold' if cold else 'warm'} page cache": watch.device,
        "checkpoint in the page cache afterwards, bytes": pagecache.resident(files),
        "arenas by rank, bytes": [entry.bytes for entry in held],
        "host memory of the agents, MB": [round(size / 1e6, 1) for size in rss],
    }
    for what, value in rows.items():
        notes.note(f"{name}load: {what}", value)
    groups = {(layout.replica_of(report.rank), report.sets[0].group) for report in reports}
    notes.check(sorted(ready) == [report.rank for report in reports], f"{name}not all ranks said ready: {ready}")
    notes.check(len(watch.loaders) == layout.launches, f"{name}{len(watch.loaders)} loaders, not {layout.launches}")
    notes.check(all(len(report.sets) == 1 for report in reports), f"{name}a rank has several sets")
    notes.check(len(groups) == layout.replicas, f"{name}ranks and their loads: {sorted(groups)}")
    notes.check(max(rss) < AGENT_BYTES, f"{name}an agent has {max(rss)} bytes of host memory")


def beside(parts: list[Deployed], notes: Notes, baseline: list[int]) -> None:
    """Device memory that is in use on each GPU beside the arenas, and was not before the load."""
    gpus = range(parts[0].layout.gpus)
    uuids = [rig.gpu_uuid(gpu) for gpu in gpus]
    arenas = dict.fromkeys(uuids, 0)
    for agent in (agent for part in parts for agent in part.agents):
        report = agent.report()
        arenas[report.gpu_uuid] += sum(entry.bytes for entry in report.sets)
    rest = [rig.device_used(gpu) - baseline[gpu] - arenas[uuids[gpu]] for gpu in gpus]
    notes.note("load: idle device memory beside the arenas by GPU, MiB", [round(size / MIB, 1) for size in rest])
    notes.check(max(rest) <= BESIDE_BYTES, f"bytes in use beside the arenas: {rest}")


def settle(gpus: int, notes: Notes) -> None:
    """Wait until no process is left on these GPUs: its memory would be taken for somebody else's."""
    try:
        rig.wait_for(
            lambda: not any(map(rig.process_used, range(gpus))), notes.left(30), "all CUDA contexts to be gone"
        )
    except AssertionError as error:
        notes.check(False, str(error))
