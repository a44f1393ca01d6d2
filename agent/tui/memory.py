"""Who owns a device's memory, as a bar, a legend and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from weightcache import text
from weightcache.monitor.ownership import Ownership, ownership
from weightcache.tui import words
from weightcache.tui.attached import attached
from weightcache.tui.cells import Cell, Line, Marks, clip, fold, width_of

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import Device, Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import RankStatus

PARTS = ("weights", "engines", "other", "free")
BARRED = 60
"""From so many cells on there is room for a bar beside the name."""

LONGEST_SENTENCE = 3
"""Lines; the details of the rank have all of it."""


def lines(snapshot: Snapshot, view: RankView, seconds: float, marks: Marks, width: int) -> list[Line]:
    """The panel of one rank in ``width`` cells."""
    status = view.status
    device = snapshot.device(status.gpu_uuid) if status.gpu_uuid or status.backend == "host" else None
    made: list[Line] = []
    name = f"rank {status.rank}: "
    if device is not None:
        made += _measured(
            ownership(snapshot, device), name + words.device_name(device), _hidden(device, status), marks, width
        )
    else:
        held = sum(entry.bytes for entry in status.sets)
        known = f"weights {text.size(held)}; " if held else ""
        made.append([Cell(name, "strong"), Cell(f"{known}device memory unknown")])
    sentences = [Cell(words.holders(status))] if status.sets else []
    sentences += words.notes(view, snapshot.at, seconds)
    for sentence in sentences:
        folded = fold(sentence.text, width)
        cut = len(folded) > LONGEST_SENTENCE
        made += [[sentence._replace(text=line)] for line in folded[: LONGEST_SENTENCE - cut]]
        if cut:
            made.append([sentence._replace(text="(all of it: Enter on the rank)")])
    return made


def _hidden(device: Device, status: RankStatus) -> bool:
    """Whether the driver tells of none of the attached engines what it uses (another PID namespace, another user)."""
    pids = {one.lease.pid for one in attached(status)}
    return bool(pids) and not any(process.pid in pids and process.bytes is not None for process in device.processes)


def _measured(owned: Ownership, name: str, hidden: bool, marks: Marks, width: int) -> list[Line]:
    total = text.size(owned.total)
    name = clip(name, width // 2 if width >= BARRED else width - len(total) - 1, marks)
    room = width - cell_len(name) - len(total) - 4
    amounts = [getattr(owned, part) for part in PARTS]
    drawn = {part: getattr(marks, part) for part in PARTS}
    legend: list[list[Cell]] = [[]]
    for part, amount in zip(PARTS, amounts, strict=True):
        told = "unknown, in other" if hidden and part == "engines" else text.size(amount)
        entry = [Cell(drawn[part], _style(part)), Cell(f" {part} {told}")]
        if legend[-1] and width_of([*legend[-1], *entry]) + 3 > width:
            legend.append([])
        legend[-1] += [Cell("   "), *entry] if legend[-1] else entry
    if width < BARRED:
        return [[Cell(f"{name} {total}", "strong")], *legend]
    bar = [Cell(drawn[part] * cells, _style(part)) for part, cells in zip(PARTS, shares(amounts, room), strict=True)]
    return [[Cell(f"{name} ", "strong"), Cell("["), *bar, Cell("]"), Cell(f" {total}", "strong")], *legend]


def _style(part: str) -> str:
    return "dim" if part == "free" else part


def shares(amounts: list[int], cells: int) -> list[int]:
    """``cells`` in proportion to ``amounts``; what is there at all gets at least one."""
    total = sum(amounts)
    if not total:
        return [0] * (len(amounts) - 1) + [cells]
    made = [max(amount * cells // total, 1) if amount else 0 for amount in amounts]
    while (over := sum(made) - cells) != 0:
        # The largest part can spare a cell, or has lost the most by rounding down.
        made[max(range(len(made)), key=lambda i: made[i])] -= 1 if over > 0 else -1
    return made
