"""`wcache caches`: what is kept of compiled kernels, for whom, and how to be rid of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global
from weightcache.compiled import places
from weightcache.compiled.entry import Entry, in_use, measure
from weightcache.compiled.store import of_user
from weightcache.errors import InUse
from weightcache.text import count, duration, escape, size, table

if TYPE_CHECKING:
    from weightcache.monitor.site import Site

DESCRIPTION = """\
Kernels that engines of this user compiled when they ran, kept in one directory for each environment: interpreter,
versions of torch, triton, SGLang and kernel packages, driver, GPUs, compilers. wcache-launch makes them, and removes
those that were not used for compiled.keep_days days, and the oldest ones while all take more than compiled.max_bytes;
never the last used one, nor one that an engine uses (docs/compiled.md)."""

CLEAN = """\
Remove the directories that no engine uses but the last used one, whatever their age; with --all that one, too. Those in
use stay, which is an error with --all."""

HEADER = ("STAMP", "SIZE", "FILES", "LAST USE", "IN USE", "PYTHON", "TORCH", "SGLANG", "GPU")
RIGHT = ("SIZE", "FILES", "LAST USE")


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser("caches", help="kernels that engines compiled, and are kept", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1')
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)
    below = parser.add_subparsers(dest="action", metavar="ACTION")
    clean = below.add_parser("clean", help="remove what no engine uses", description=CLEAN)
    clean.add_argument("--all", action="store_true", help="also the one that was used last")
    clean.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    add_global(clean)
    clean.set_defaults(run=run_clean, parser=clean)


def run(options: argparse.Namespace) -> int:
    """List the stamps."""
    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    found = of_user(make=False)
    rows = [_row(entry) for entry in found.entries()]
    own = places.operators(os.environ)
    if options.json:
        plain = {"schema": 1, "directory": str(found.root), "stamps": rows, "operators": dict(own), **_limits(site)}
        print(json.dumps(plain, indent=2))
        return 0
    if not rows:
        print(f"nothing yet in {escape(str(found.root))}: wcache-launch makes a directory there when an engine starts")
    else:
        print("\n".join(table(HEADER, [_cells(row) for row in rows], RIGHT)))
    for row in rows:
        if row["stay"]:
            print(f"{row['stamp']}: where they were before: {', '.join(row['stay'])}")
    for variable, by in own:
        because = "" if by == variable else f", since {by} is set"
        print(f"{variable} is left as the environment says{because}")
    total, limit = sum(row["bytes"] for row in rows), site.config.compiled.max_bytes
    if total > limit:
        print(f"all together {size(total)}, more than compiled.max_bytes ({size(limit)})")
    return 0


def run_clean(options: argparse.Namespace) -> int:
    """Remove stamps; raises InUse if one of those that should go is in use."""
    found = of_user(make=False)
    wanted = found.entries()[0 if options.all else 1 :]
    gone, kept, freed = [], [], 0
    for entry in wanted:
        taken = measure(entry.directory).bytes
        if found.remove(entry):
            gone.append(entry.stamp)
            freed += taken
        else:
            kept.append(entry.stamp)
    if options.json:
        print(json.dumps({"schema": 1, "removed": gone, "in_use": kept, "bytes": freed}))
    else:
        print(f"removed {count(len(gone), 'stamp')}, {size(freed)}")
    sys.stdout.flush()
    if kept and options.all:
        raise InUse(f"in use, or not to be removed: {', '.join(kept)}")
    return 0


def _row(entry: Entry) -> dict[str, Any]:
    taken = measure(entry.directory)
    return {
        "stamp": entry.stamp,
        "directory": str(entry.directory),
        "bytes": taken.bytes,
        "files": taken.files,
        "used_at": entry.used,
        "in_use": in_use(entry),
        "facts": dict(entry.facts),
        "stay": list(entry.stay),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    facts = row["facts"]
    return (
        row["stamp"],
        size(row["bytes"]),
        str(row["files"]),
        f"{duration(max(0.0, time.time() - row['used_at']))} ago",
        "yes" if row["in_use"] else "no",
        *(escape(facts.get(name, "?" if not facts else "-")) for name in ("python", "torch", "sglang", "gpu")),
    )


def _limits(site: Site) -> dict[str, Any]:
    limits = site.config.compiled
    return {"limits": {"max_bytes": limits.max_bytes, "keep_days": limits.keep_days}}
