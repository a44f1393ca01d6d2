"""`wcache starts`: how long each start through wcache-launch took, and what it spent its time on."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

from weightcache.cli.parsing import Parser, add_global, as_path
from weightcache.errors import UsageError, WeightcacheError
from weightcache.starts import comparison, draw, folder, reading, words
from weightcache.text import coloured, escape, paint, table

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from weightcache.starts.reading import Start

DESCRIPTION = """\
List the starts of engines through wcache-launch, the newest last. The newest 50 of each user are kept.

WORKERS says whether the server's processes began with the start (cold) or had imported SGLang before (warm), WEIGHTS
how they were got. TOKEN is the time to the first token that the engine made, for a warm-up request or a real one,
SERVING that to the end of the warm-up. SLOWER names the phases that took clearly longer than in the last start of the
same arguments, workers and kind of weights. STATE: starting, serving, how the server ended, lost (its launcher was
killed), damaged (the record makes no sense)."""

SHOW = """\
Draw one start: a bar for each phase of each process, all on one time axis. The axis ends when the server served."""

HERE = "directory of the starts (default: starts below $WEIGHTCACHE_STATE_DIR, or below this user's state directory)"


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command group."""
    group = commands.add_parser("starts", help="what starts of engines spent their time on", description=DESCRIPTION)
    group.set_defaults(run=_list, parser=group)
    actions = group.add_subparsers(title="actions", dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="draw one start", description=SHOW)
    show.add_argument("start", nargs="?", type=int, metavar="START", help="its number (default: the newest)")
    show.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    show.set_defaults(run=_show, parser=show)
    for parser in (group, show):
        parser.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1')
        parser.add_argument("--dir", type=as_path, metavar="DIR", help=HERE)
        add_global(parser)


def _list(options: argparse.Namespace) -> int:
    pairs = comparison.pairs(reversed(_starts(options)))
    if options.json:
        print(json.dumps({"schema": 1, "starts": [words.plain(*pair) for pair in pairs]}, indent=2))
        return 0
    lines = table(words.HEADER, [words.row(*pair) for pair in pairs], words.RIGHT)
    if coloured(sys.stdout):
        for place, (start, _) in enumerate(pairs, 1):
            state = words.state(start)
            if colour := words.COLOURS.get(state):
                before, found, after = lines[place].rpartition(state)
                lines[place] = before + paint(found, state, colour) + after
    print("\n".join(lines))
    return 0


def _show(options: argparse.Namespace) -> int:
    starts = _starts(options)
    wanted = options.start if options.start is not None else starts[0].number if starts else 0
    start = next((entry for entry in starts if entry.number == wanted), None)
    if start is None:
        kept = f"starts {starts[-1].number} to {starts[0].number} are kept" if starts else "no start is kept"
        raise UsageError(f"there is no start {wanted}: {kept} in {_directory(options)}" if wanted else kept)
    before = comparison.previous(start, starts)
    if options.json:
        print(json.dumps({"schema": 1, **words.plain(start, before, whole=True)}, indent=2))
        return 0
    width = shutil.get_terminal_size((80, 24)).columns
    print("\n".join([*words.details(start, before), *draw.lines(start, width, options.ascii or not _shows_blocks())]))
    return 0


def _directory(options: argparse.Namespace) -> Path:
    chosen: Path | None = options.dir
    if chosen is not None:
        return chosen
    try:
        return folder.directory()
    except RuntimeError as error:  # a user without a home
        raise UsageError(f"{error}: name the directory with --dir") from None


def _starts(options: argparse.Namespace) -> list[Start]:
    """The newest first. Raises WeightcacheError."""
    where = _directory(options)
    try:
        return list(reading.newest_first(where))
    except OSError as error:
        raise WeightcacheError(f"{escape(str(where))} cannot be read ({error.strerror})") from None


def _shows_blocks() -> bool:
    try:
        "█▏│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
