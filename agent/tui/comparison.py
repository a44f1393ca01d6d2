"""Two fingerprints side by side: which fields differ, and what each difference would mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache import text
from weightcache.fingerprint import CONSEQUENCES, diff
from weightcache.tui import words
from weightcache.tui.cells import Cell, Line, clip, fold, pad, safe
from weightcache.tui.widgets.columns import Column
from weightcache.tui.widgets.table import Row

if TYPE_CHECKING:
    from weightcache.fingerprint import Fingerprint
    from weightcache.monitor.snapshot import Snapshot
    from weightcache.protocol import Refusal, SetStatus
    from weightcache.tui.cells import Marks

RANK_FIELDS = frozenset({"tp_rank", "pp_rank", "ep_rank"})
"""They number the shard, so that they differ between the ranks of one model."""

CHOICES = (
    Column("RANK", right=True),
    Column("SET", most=16),
    Column("ROLE", drop=1, most=12),
    Column("MODEL", least=12, tail=True),
    Column("DIFFERING FIELDS", drop=2, right=True),
)
FIELD_CELLS = 18


@dataclass(frozen=True, slots=True)
class Side:
    """A set and the rank that holds it."""

    rank: int
    entry: SetStatus

    @property
    def name(self) -> str:
        """The set in one phrase."""
        return f"rank {self.rank}, {safe(self.entry.role)} v{self.entry.version}"


@dataclass(frozen=True, slots=True)
class Refused:
    """An engine that asked for other weights than a rank held. Of its fingerprint only what differed is known."""

    rank: int
    refusal: Refusal
    at: float
    """When it is looked at, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """The engine in one phrase."""
        return f"engine {self.refusal.pid}, refused {text.duration(self.at - self.refusal.at)} ago"


Other = Side | Refused


def refused(snapshot: Snapshot, left: Side) -> list[Refused]:
    """The engines that were refused lately because ``left`` was not what they needed, the latest first."""
    found = [
        Refused(view.status.rank, refusal, snapshot.at)
        for view in snapshot.ranks
        for refusal in view.status.refusals
        if view.status.rank == left.rank and refusal.role == left.entry.role and refusal.differences
    ]
    return [one for one in reversed(found) if _was_of(one.refusal, left.entry.fingerprint)]


def _was_of(refusal: Refusal, fingerprint: Fingerprint) -> bool:
    """Whether the refusal was told from these weights: long values travel shortened."""
    return all(
        str(getattr(fingerprint, found.field, None)).startswith(str(found.cached).removesuffix("..."))
        for found in refusal.differences
    )


def row(left: Side, right: Other) -> Row:
    """A set, or an engine, to choose for a comparison with ``left``."""
    if isinstance(right, Refused):
        return _row_of_engine(right)
    entry = right.entry
    differing = len(diff(left.entry.fingerprint, entry.fingerprint))
    cells = (
        Cell(str(right.rank), order=float(right.rank)),
        Cell(safe(entry.id)),
        Cell(safe(entry.role)),
        Cell(safe(entry.model)),
        Cell(str(differing) if differing else "none", order=float(differing)),
    )
    return Row((right.rank, entry.id), cells)


def _row_of_engine(right: Refused) -> Row:
    refusal = right.refusal
    differing = len(refusal.differences)
    cells = (
        Cell(str(right.rank), order=float(right.rank)),
        Cell(f"engine {refusal.pid}"),
        Cell(safe(refusal.role)),
        Cell(f"refused {text.duration(right.at - refusal.at)} ago"),
        Cell(str(differing), order=float(differing)),
    )
    return Row(key(right), cells)


def key(other: Other) -> tuple[int, str]:
    """What a set or an engine is chosen by."""
    return other.rank, (other.entry.id if isinstance(other, Side) else f"engine {other.refusal.pid}")


def lines(left: Side, right: Other, marks: Marks, width: int) -> list[Line]:
    """The comparison in ``width`` cells: differences first, then what is equal."""
    if isinstance(right, Refused):
        found = right.refusal.differences
        of_right = (f"engine {right.refusal.pid}", "-")
    else:
        found = diff(left.entry.fingerprint, right.entry.fingerprint)
        of_right = (safe(right.entry.id), words.digest(right.entry))
    differing = {difference.field: difference for difference in found}
    same = [name for name in CONSEQUENCES if name not in differing]
    made: list[Line] = [
        _row("", left.name, right.name, "head", marks, width),
        _row("set", safe(left.entry.id), of_right[0], "", marks, width),
        _row("fingerprint", words.digest(left.entry), of_right[1], "", marks, width),
        [Cell("")],
    ]
    verdict = f"{len(differing)} of {len(CONSEQUENCES)} fields differ, {len(same)} are equal"
    made.append([Cell(verdict if differing else f"all {len(same)} fields are equal", "strong")])
    natural = left.rank != right.rank and RANK_FIELDS & differing.keys()
    for name, difference in differing.items():
        expected = natural and name in RANK_FIELDS
        cached, other = safe(str(difference.cached)), safe(str(difference.engine))
        made += _values(f"{'~' if expected else '!'} {name}", cached, other, "" if expected else "bad", marks, width)
        meaning = "each rank has its own shard: this differs by nature" if expected else difference.consequence
        made += [[Cell(f"    {part}", "dim" if expected else "busy")] for part in fold(meaning, width - 4)]
    if same:
        made += [[Cell("")], [Cell("equal", "head")]]
        for name in same:
            value = safe(str(getattr(left.entry.fingerprint, name))) or '""'
            made.append(
                [
                    Cell(pad(f"= {name}", FIELD_CELLS + 2), "dim"),
                    Cell(clip(value, width - FIELD_CELLS - 2, marks), "dim"),
                ]
            )
    return [*made, [Cell("")], *_note(right, width)]


def _row(label: str, left: str, right: str, style: str, marks: Marks, width: int) -> Line:
    half = max((width - FIELD_CELLS - 4) // 2, 4)
    first = pad(clip(left, half, marks), half)
    return [
        Cell(pad(label, FIELD_CELLS), style),
        Cell("  "),
        Cell(first, style),
        Cell("  "),
        Cell(clip(right, half, marks), style),
    ]


def _values(label: str, left: str, right: str, style: str, marks: Marks, width: int) -> list[Line]:
    """Both values, in full: long ones below each other."""
    half = max((width - FIELD_CELLS - 4) // 2, 4)
    if len(fold(left, half)) == len(fold(right, half)) == 1:
        return [_row(label, left or '""', right or '""', style, marks, width)]
    made: list[Line] = [[Cell(label, style)]]
    for side, value in (("left", left), ("right", right)):
        for i, part in enumerate(fold(value or '""', max(width - 11, 2))):
            made.append([Cell(f"    {side if i == 0 else '':5}  ", "dim"), Cell(part, style)])
    return made


def _note(right: Other, width: int) -> list[Line]:
    sentence = "An attached engine's fingerprint is its set's; engines that were refused lately are among the choices."
    if isinstance(right, Refused):
        sentence = f"{words.user(right.refusal.uid)}: {safe(right.refusal.command) or 'its command is not known'}"
    return [[Cell(part, "dim")] for part in fold(sentence, width)]
