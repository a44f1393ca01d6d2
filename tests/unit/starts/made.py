"""Traces as the launcher and an engine's processes would leave them, without either."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from weightcache.starts import folder, reading
from weightcache.starts.reading import Start
from weightcache.starts.record import SCHEMA, Header, Kind, Mark, encode

ORIGIN = 1000.0
MAIN, SCHEDULER, DETOKENIZER, LAUNCHER = 11, 12, 13, 10


def header(**changes: object) -> Header:
    values = {
        "schema": SCHEMA, "began": ORIGIN, "epoch": 1.8e9, "model": "/models/a", "arguments": ("--model-path", "a"),
        "levers": ("caches",), "version": "0.1.0",
    }  # fmt: skip
    return Header(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Trace:
    """Lines in the order in which they were written; times are seconds since the origin."""

    lines: list[bytes] = field(default_factory=lambda: [encode(header())])

    def mark(self, at: float, pid: int, kind: Kind, name: str, rank: int = -1, how: str = "", **facts: float) -> Trace:
        self.lines.append(encode(Mark(ORIGIN + at, pid, kind, name, rank, how, facts)))
        return self

    def process(self, pid: int, role: str, began: float, seen: float, how: str = "cold") -> Trace:
        return self.mark(seen, pid, "process", role, how=how, began=ORIGIN + began)

    def phase(self, pid: int, name: str, begin: float, end: float, **facts: float) -> Trace:
        return self.mark(begin, pid, "begin", name, **facts).mark(end, pid, "end", name)

    def point(self, at: float, pid: int, name: str, **facts: float) -> Trace:
        return self.mark(at, pid, "point", name, **facts)

    @property
    def data(self) -> bytes:
        return b"".join(self.lines)

    def start(self, number: int = 1, live: bool = False) -> Start:
        return reading.parse(number, self.data, live)

    def write(self, where: Path, number: int = 1) -> Path:
        where.mkdir(mode=0o700, exist_ok=True)
        path = folder.file(where, number)
        path.write_bytes(self.data)
        return path


def usual(imports: float = 8.0, outcome: str = "attached", how: str = "cold", ended: bool = True) -> Trace:
    """A start of one rank: ``imports`` seconds in each process, about 24 in all with 8."""
    made = Trace().point(0.5, LAUNCHER, "attempt")
    at = 0.5 + imports
    made.process(MAIN, "main", 0.5, at, how).phase(MAIN, "arguments", at, at + 1).point(at + 1, MAIN, "spawned")
    began, at = at + 1, at + 1 + imports
    made.process(SCHEDULER, "scheduler", began, at, how).mark(at, SCHEDULER, "begin", "scheduler")
    made.phase(MAIN, "tokenizer", began, began + 2)
    made.process(DETOKENIZER, "detokenizer", began, at, how).point(at + 0.5, DETOKENIZER, "ready")
    made.mark(at, SCHEDULER, "point", "rank", rank=0)
    made.phase(SCHEDULER, "distributed", at, at + 0.5).phase(SCHEDULER, "weights", at + 0.5, at + 0.75)
    made.mark(at + 0.7, LAUNCHER, "point", outcome, rank=0, how="target", map=1.5, bind=2.5)
    made.mark(at + 1, SCHEDULER, "begin", "graphs")
    for place, size in enumerate((4, 2, 1)):
        made.phase(SCHEDULER, "decode graph", at + 1.1 + 0.2 * place, at + 1.2 + 0.2 * place, size=size)
    made.mark(at + 2, SCHEDULER, "end", "graphs").mark(at + 2.5, SCHEDULER, "end", "scheduler")
    made.point(at + 2.5, SCHEDULER, "ready")
    made.phase(MAIN, "warm-up", at + 3, at + 5).point(at + 4.5, MAIN, "warm-up token").point(at + 5, MAIN, "serving")
    made.point(at + 60, MAIN, "first token")
    return made.point(at + 100, LAUNCHER, "ended", status=0) if ended else made
