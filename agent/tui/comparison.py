"""Two fingerprints side by side: which fields differ, and what each difference would mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcache import text
from weightcache.fingerprint import CONSEQUENCES, diff
from weightcache.tui import words
from weightcache.tui.cells import Cell, Line, clip, fold, pad, safe
from weightcache.tui.widgets.columns import Column
from weightcache.tui.widgets.table import Row

if TYPE_CHECKING:
    from weightcache.monitor.snapshot import RankEvent, Snapshot
    from weightcache.protocol import SetStatus
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
KEPT_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class Side:
    """A set and the rank that holds it."""

    rank: int
    entry: SetStatus

    @property
    def name(self) -> str:
        """The set in one phrase."""
        return f"rank {self.rank}, {safe(self.entry.role)} v{self.entry.version}"


def row(left: Side, right: Side) -> Row:
    """A set to choose for a comparison with ``left``."""
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


def lines(left: Side, right: Side, refusals: Sequence[RankEvent], marks: Marks, width: int) -> list[Line]:
    """The comparison in ``width`` cells: differences first, then what is equal."""
    differing = {found.field: found for found in diff(left.entry.fingerprint, right.entry.fingerprint)}
    same = [name for name in CONSEQUENCES if name not in differing]
    made: list[Line] = [
        _row("", left.name, right.name, "head", marks, width),
        _row("set", safe(left.entry.id), safe(right.entry.id), "", marks, width),
        _row("fingerprint", words.digest(left.entry), words.digest(right.entry), "", marks, width),
        [Cell("")],
    ]
    verdict = f"{len(differing)} of {len(CONSEQUENCES)} fields differ, {len(same)} are equal"
    made.append([Cell(verdict if differing else f"all {len(same)} fields are equal", "strong")])
    natural = left.rank != right.rank and RANK_FIELDS & differing.keys()
    for name, found in differing.items():
        expected = natural and name in RANK_FIELDS
        cached, other = safe(str(found.cached)), safe(str(found.engine))
        made += _values(f"{'~' if expected else '!'} {name}", cached, other, "" if expected else "bad", marks, width)
        meaning = "each rank has its own shard: this differs by nature" if expected else found.consequence
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
    return [*made, [Cell("")], *_of_engines(refusals, width)]


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


def refusals(snapshot: Snapshot, ranks: set[int]) -> list[RankEvent]:
    """The latest engines that were refused because their fingerprint differs."""
    found = [one for one in snapshot.events if one.rank in ranks and one.happened.event == "refused"]
    return [one for one in found if "other weights" in one.happened.text or "another model" in one.happened.text][
        -KEPT_REFUSALS:
    ]


def _of_engines(refused: Sequence[RankEvent], width: int) -> list[Line]:
    sentence = (
        "An attached engine's fingerprint is its set's. Of an engine that was refused, the agent tells which fields "
        "differed and not their values: those are in the engine's own output."
    )
    made: list[Line] = [[Cell(part, "dim")] for part in fold(sentence, width)]
    for one in refused:
        told = f"{text.moment(one.happened.at)} {safe(one.happened.text)}"
        made += [[Cell(part)] for part in fold(told, width)]
    return made
