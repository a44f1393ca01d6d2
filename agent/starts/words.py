"""What is known of a start, for people and for programs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from weightcache.starts import comparison, phases
from weightcache.starts.reading import FIRST_TOKEN, SERVING, WARM_UP_TOKEN
from weightcache.text import escape, moment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightcache.starts.reading import Process, Start

HEADER = ("START", "WHEN", "MODEL", "WORKERS", "WEIGHTS", "TOKEN", "SERVING", "SLOWER", "STATE")
RIGHT = ("START", "TOKEN", "SERVING")
COLOURS = {"serving": "green", "starting": "yellow", "lost": "red", "damaged": "red"}
_MODEL = 24


def state(start: Start) -> str:
    """Where a start stands. ``lost``: its launcher ended without a word, as after SIGKILL."""
    if start.header is None:
        return "starting" if start.live else "damaged"
    if start.status is not None:
        return _ended(start.status)
    if not start.live:
        return "lost"
    return "starting" if start.point(SERVING) is None else "serving"


def _ended(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def token(start: Start) -> float | None:
    """Seconds to the first token that the engine made, for whomever."""
    moments = [at for name in (WARM_UP_TOKEN, FIRST_TOKEN) if (at := start.point(name)) is not None]
    return min(moments, default=None)


def row(start: Start, before: Start | None) -> tuple[str, ...]:
    """A start as a line of the list."""
    if start.header is None:
        return (str(start.number), *["-"] * (len(HEADER) - 2), state(start))
    worse = comparison.slower(start, before) if before else ()
    return (
        str(start.number),
        moment(start.header.epoch),
        _short(escape(start.header.model.rstrip("/").rpartition("/")[2])) or "-",
        escape(start.how) or "-",
        start.outcome or "-",
        _seconds(token(start)),
        _seconds(start.point(SERVING)),
        escape(", ".join(entry.phase for entry in worse)) or "-",
        state(start),
    )


def _short(name: str) -> str:
    return name if len(name) <= _MODEL else f"{name[: _MODEL - 2]}.."


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def details(start: Start, before: Start | None) -> list[str]:
    """What is said above the bars of one start."""
    if start.header is None:
        return [f"start {start.number}: {state(start)}"]
    lines = [
        f"start {start.number}, {moment(start.header.epoch)}: {escape(start.header.model) or 'no model'}",
        f"{state(start)}, {escape(start.how) or 'unknown'} workers, weights {start.outcome or 'unknown'}",
    ]
    if len(start.attempts) > 1:
        lines.append(f"{len(start.attempts)} attempts: attaching failed, and the server was started again from disk")
    if sentence := phases.sentence(start):
        lines.append(sentence)
    if before is not None:
        lines.append(comparison.sentence(start, before) or f"no phase was clearly slower than in start {before.number}")
    for entry in start.weights:
        steps = ", ".join(f"{escape(name)} {value:.0f}" for name, value in entry.milliseconds.items())
        role = f" {escape(entry.role)}" if entry.role not in ("", "target") else ""
        lines.append(f"rank {entry.rank}{role}: {entry.outcome}" + (f" (milliseconds: {steps})" if steps else ""))
    if start.damaged:
        lines.append(f"{start.damaged} of its lines make no sense and were left out")
    return lines


def plain(start: Start, before: Start | None, whole: bool = False) -> dict[str, Any]:
    """A start for programs; all times in seconds since its origin. ``whole``: with its processes."""
    header = start.header
    found: dict[str, Any] = {
        "start": start.number,
        "state": state(start),
        "status": start.status,
        "damaged": start.damaged,
        "began": header.epoch if header else None,
        "model": header.model if header else "",
        "arguments": list(header.arguments) if header else [],
        "levers": list(header.levers) if header else [],
        "workers": start.how,
        "weights": start.outcome,
        "attempts": len(start.attempts),
        "warm_up_token": start.point(WARM_UP_TOKEN),
        "first_token": start.point(FIRST_TOKEN),
        "serving": start.point(SERVING),
        "phases": {name: round(seconds, 6) for name, seconds in phases.phases(start).items()},
        "compared_with": before.number if before else None,
        "slower": [
            {"phase": entry.phase, "seconds": round(entry.now, 6), "before": round(entry.before, 6)}
            for entry in (comparison.slower(start, before) if before else ())
        ],
    }
    if whole and header:
        found["ranks"] = [
            {"rank": w.rank, "role": w.role, "outcome": w.outcome, "attempt": w.attempt, "milliseconds": w.milliseconds}
            for w in start.weights
        ]
        found["processes"] = list(_processes(start.processes, header.began))
    return found


def _processes(processes: Iterable[Process], origin: float) -> Iterable[dict[str, Any]]:
    for process in processes:
        yield {
            "pid": process.pid,
            "role": process.role,
            "rank": process.rank if process.rank >= 0 else None,
            "replica": process.replica,
            "how": process.how,
            "attempt": process.attempt,
            "began": round(process.began - origin, 6),
            "phases": [
                {
                    "name": span.name,
                    "begin": round(span.begin - origin, 6),
                    "end": None if span.end is None else round(span.end - origin, 6),
                    "depth": span.depth,
                    **({"size": span.size} if span.size else {}),
                }
                for span in process.spans
            ],
            "points": {name: round(at - origin, 6) for name, at in process.points.items()},
        }
