"""One start as bars on one time axis, for a terminal of any width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache.starts.phases import length
from weightcache.starts.reading import FIRST_TOKEN, READY, SERVING, WARM_UP_TOKEN
from weightcache.text import escape

if TYPE_CHECKING:
    from weightcache.starts.reading import Process, Span, Start

NAME = 24
SECONDS = 9
NARROWEST = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
POINTS = {READY: "ready", "listening": "listening", WARM_UP_TOKEN: "warm-up token", SERVING: "serving"}


@dataclass(frozen=True, slots=True)
class Canvas:
    """``width`` columns for everything; ``until`` seconds fit on the axis. ``plain``: ASCII only."""

    width: int
    until: float
    plain: bool = False

    @property
    def columns(self) -> int:
        """Columns of the axis."""
        return max(NARROWEST, self.width - NAME - SECONDS - 2)

    def column(self, seconds: float) -> float:
        """Where a moment lies on the axis."""
        return min(max(seconds / self.until, 0.0), 1.0) * self.columns

    def bar(self, stretches: list[tuple[float, float]]) -> str:
        """The given stretches of time; one that is shorter than a column is still visible."""
        cells = [0.0] * self.columns
        for begin, end in stretches:
            low, high = self.column(begin), self.column(end)
            for column in range(self.columns):
                cells[column] = max(cells[column], min(high, column + 1) - max(low, column))
            first = min(int(low), self.columns - 1)
            cells[first] = max(cells[first], 1 / 8)
        if self.plain:
            return "".join("#" if cell >= 0.5 else "." if cell > 0 else " " for cell in cells)
        return "".join(_EIGHTHS[max(1, round(cell * 8)) if cell > 0 else 0] for cell in cells)

    def mark(self, seconds: float) -> str:
        """One moment."""
        column = min(int(self.column(seconds)), self.columns - 1)
        return " " * column + ("|" if self.plain else "│") + " " * (self.columns - column - 1)

    def axis(self) -> str:
        """Times below their columns, as many as fit."""
        text = ""
        step = next((step for step in _steps() if self.columns * step / self.until >= 8), self.until)
        moment = 0.0
        while (column := round(self.column(moment))) + 4 <= self.columns:
            text = text.ljust(column) + f"{moment:g}"
            moment += step
        return text


def _steps() -> list[float]:
    return [base * power for power in (0.001, 0.01, 0.1, 1, 10, 100, 1000, 10_000) for base in (1, 2, 5)]


def lines(start: Start, width: int, plain: bool = False) -> list[str]:
    """The bars of a start: a block for each process, a line for each of its phases."""
    if start.header is None or not start.processes:
        return []
    origin = start.header.began
    canvas = Canvas(width, _until(start), plain)
    drawn = [f"{'seconds':<{NAME}} {canvas.axis()}".rstrip()]
    for process in start.processes:
        again = f", attempt {process.attempt}" if len(start.attempts) > 1 else ""
        drawn.append(f"{escape(process.title)} (process {process.pid}, {escape(process.how)}{again})")
        rows: dict[tuple[int, str], list[Span]] = {}
        for span in process.spans:
            rows.setdefault((span.depth, span.name), []).append(span)
        for (depth, name), spans in rows.items():
            drawn.append(_row(canvas, origin, process, " " * (depth + 2) + escape(name), spans))
        for point, shown in POINTS.items():
            if point in process.points:
                moment = process.points[point] - origin
                drawn.append(_line("  " + shown, canvas.mark(moment), moment))
        if FIRST_TOKEN in process.points:
            drawn.append(f"  {FIRST_TOKEN} of a request: {process.points[FIRST_TOKEN] - origin:.2f} s after the start")
    return drawn


def _until(start: Start) -> float:
    """The end of the axis: readiness. What comes later is cut off there: graphs that are captured when it is idle."""
    origin = start.header.began if start.header else 0.0
    if (ready := length(start)) is not None and ready > 0:
        return ready
    moments = [process.began for process in start.processes]
    for process in start.processes:
        moments += [span.end or span.begin for span in process.spans]
        moments += [at for name, at in process.points.items() if name != FIRST_TOKEN]
    return max(0.001, *(moment - origin for moment in moments))


def _row(canvas: Canvas, origin: float, process: Process, name: str, spans: list[Span]) -> str:
    until = origin + canvas.until
    stretches = [(span.begin - origin, (until if span.end is None else span.end) - origin) for span in spans]
    visible = [(begin, end) for begin, end in stretches if begin <= canvas.until]
    times = f" x{len(spans)}" if len(spans) > 1 else ""
    seconds = sum(end - begin for begin, end in stretches)
    bar = canvas.bar(visible) if visible else f"(from {stretches[0][0]:.1f} s)".ljust(canvas.columns)
    return _line(name + times, bar, seconds, "..." if spans[-1].end is None else "")


def _line(name: str, bar: str, seconds: float, tail: str = "") -> str:
    if len(name) > NAME:
        name = name[: NAME - 2] + ".."
    return f"{name:<{NAME}} {bar} {seconds:>{SECONDS - 3}.2f}{tail}".rstrip()
