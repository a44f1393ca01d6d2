"""Everything that is known of one thing, as labelled lines: what Enter shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from weightcache import text
from weightcache.tui import slots, words
from weightcache.tui.attached import Attached, attached
from weightcache.tui.cells import Cell, Line, fold, pad, safe

if TYPE_CHECKING:
    from weightcache.fingerprint import Fingerprint
    from weightcache.monitor.snapshot import RankEvent, Snapshot
    from weightcache.monitor.view import RankView
    from weightcache.protocol import SetStatus

Fact = tuple[str, str | Cell]
"""A label and what is known; a heading where the latter is empty."""

LABEL_CELLS = 20


def listing(facts: Iterable[Fact], width: int) -> list[Line]:
    """Labels in a column of their own, values folded beside them."""
    label_cells = min(LABEL_CELLS, width // 3)
    lines: list[Line] = []
    for label, value in facts:
        cell = value if isinstance(value, Cell) else Cell(value)
        if not cell.text:
            lines += [[Cell("")], [Cell(label, "head")]] if lines else [[Cell(label, "head")]]
            continue
        for i, part in enumerate(fold(cell.text, width - label_cells - 2)):
            lines.append(
                [
                    Cell(pad(label[:label_cells] if i == 0 else "", label_cells), "dim"),
                    Cell("  "),
                    cell._replace(text=part),
                ]
            )
    return lines


def of_rank(snapshot: Snapshot, view: RankView, seconds: float) -> list[Fact]:
    """A rank: agent, device, weights, counts of events."""
    status = view.status
    facts: list[Fact] = [
        (f"Rank {status.rank}", ""),
        ("state", words.state(view, snapshot.at, seconds)),
        *(("", note) for note in words.notes(view, snapshot.at, seconds)),
        ("model", safe(status.model) or "-"),
        ("weights", f"{text.size(sum(entry.bytes for entry in status.sets))} in {text.count(len(status.sets), 'set')}"),
        ("held by", words.holders(status).removeprefix("weights held by ") or "-"),
        ("engines", str(len(attached(status)))),
        ("Agent", ""),
        ("answers", {"up": "yes", "down": "no", "closed": "not this user"}[view.agent]),
        ("last heard", f"{text.duration(snapshot.at - view.heard_at)} ago" if view.heard_at else "never"),
        ("pid", str(status.pid or "-")),
        ("uptime", text.duration(status.uptime_seconds + snapshot.at - view.heard_at) if view.agent == "up" else "-"),
        ("version", safe(status.version) or "-"),
        ("backend", safe(status.backend)),
        ("Device", ""),
        ("UUID", safe(status.gpu_uuid) or "-"),
    ]
    if (device := snapshot.device(status.gpu_uuid)) and (status.gpu_uuid or status.backend == "host"):
        facts += [
            ("name", words.device_name(device)),
            ("memory", f"{text.size(device.total)}, used {text.size(device.used)}, free {text.size(device.free)}"),
        ]
        facts += [
            (f"process {process.pid}", f"{words.bytes_of(process.bytes).text}  {safe(process.command)}")
            for process in device.processes
        ]
    if status.counts:
        facts.append(("Events since the agent started", ""))
        facts += [(safe(name), str(count)) for name, count in sorted(status.counts.items())]
    return facts


def of_set(snapshot: Snapshot, view: RankView, entry: SetStatus) -> list[Fact]:
    """A weight set with all fields of its fingerprint."""
    used = [one for one in attached(view.status) if entry in one.sets]
    return [
        (f"Set {safe(entry.id)} of rank {view.status.rank}", ""),
        *([("suspect", Cell(safe(entry.suspect), "bad"))] if entry.suspect else []),
        ("role", safe(entry.role)),
        ("version", str(entry.version)),
        ("model", safe(entry.model)),
        ("revision", safe(entry.revision) or "-"),
        ("size", f"{text.size(entry.bytes)} ({entry.bytes:,} bytes) in {text.count(entry.arenas, 'arena')}"),
        ("tensors", str(entry.tensors)),
        ("published", f"{text.moment(entry.published_at)}, {text.duration(snapshot.at - entry.published_at)} ago"),
        ("loaded in", f"{text.duration(entry.load_seconds)}, {text.size(entry.bytes_read)} read"),
        ("held by", words.holders(view.status).removeprefix("weights held by ")),
        ("Fingerprint", ""),
        ("short", words.digest(entry)),
        ("full", safe(entry.digest)),
        *fields(entry.fingerprint),
        ("Engines", ""),
        *((f"engine {one.lease.pid}", f"{words.user(one.lease.uid)}  {safe(one.lease.unit)}") for one in used),
        *([] if used else [("", "none is attached")]),
    ]


def fields(fingerprint: Fingerprint) -> list[Fact]:
    """All fields of a fingerprint."""
    return [
        (field.name, safe(str(getattr(fingerprint, field.name))) or '""') for field in dataclasses.fields(fingerprint)
    ]


def of_engine(snapshot: Snapshot, view: RankView, one: Attached) -> list[Fact]:
    """An attached engine: its lease, its process, its requests."""
    lease = one.lease
    device = snapshot.device(view.status.gpu_uuid)
    own = next((process.bytes for process in device.processes if process.pid == lease.pid), None) if device else None
    more = snapshot.engine(lease.pid)
    slot = slots.of_process(snapshot).get(lease.pid)
    facts: list[Fact] = [
        (f"Engine {lease.pid} of rank {view.status.rank}", ""),
        *([("slot", slot)] if slot else []),
        ("user", f"{words.user(lease.uid)} (uid {lease.uid})"),
        ("unit", safe(lease.unit) or "-"),
        ("command", safe(lease.command) or "-"),
        ("attached", f"{text.moment(lease.since)}, {text.duration(snapshot.at - lease.since)} ago"),
        ("lease", safe(lease.lease)),
        *(
            ("set", f"{safe(entry.id)} ({safe(entry.role)}, version {entry.version}) of {safe(entry.model)}")
            for entry in one.sets
        ),
        *(
            [("set", Cell("engine of a set that is gone: it keeps that memory until it ends", "busy"))]
            if one.orphan
            else []
        ),
        ("fingerprint", "its set's: an engine attaches to nothing else"),
        ("Process", ""),
        ("GPU memory", f"{words.bytes_of(own).text} of its own, besides the weights"),
        ("host memory", words.bytes_of(more.resident if more else None).text),
        ("started", text.moment(more.started) if more else "-"),
        ("server", safe(more.launch) if more and more.launch else "-"),
        ("running requests", words.number(more.running if more else None).text),
        ("waiting requests", words.number(more.waiting if more else None).text),
    ]
    return facts


def of_event(one: RankEvent) -> list[Fact]:
    """An event with all of its text."""
    event = one.happened
    return [
        (f"Event {event.serial} of rank {one.rank}", ""),
        ("time", text.moment(event.at)),
        ("event", safe(event.event)),
        ("level", words.level(event.level)._replace(style="") if event.level == "info" else words.level(event.level)),
        ("text", safe(event.text) or "-"),
    ]


def of_events(happened: Sequence[RankEvent], rank: int, at: float, why: str) -> list[Fact]:
    """A rank's events, oldest first, as a journal has them, and why it is not the journal."""
    facts: list[Fact] = [(f"Events of rank {rank}", ""), ("note", why)]
    for one in happened:
        if one.rank == rank:
            event = one.happened
            word = f"{event.level}: " if event.level != "info" else ""
            style = words.level(event.level).style
            line = Cell(f"{word}{safe(event.event)}: {safe(event.text)}", "" if style == "dim" else style)
            facts.append((words.clock(event.at, at), line))
    return facts if len(facts) > 2 else [*facts, ("", "none is known")]
