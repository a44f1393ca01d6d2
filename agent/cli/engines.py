"""`wcache engines`: active and standby engines of this host, what their files say, and the units' drop-ins."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import commands as command_lines, records
from weightcache.cli import engines_memory, engines_setup
from weightcache.cli.parsing import Parser, add_global, as_path
from weightcache.standby import engine_config, listing
from weightcache.standby.places import EnginePaths, SlotName, config_dir, engine_name
from weightcache.text import coloured, duration, escape, paint, size, table

if TYPE_CHECKING:
    import argparse

    from weightcache.standby.listing import EngineView, SlotView

DESCRIPTION = """\
List the engines of this host that share a port with a standby, both slots of each: those with a file NAME.toml in
/etc/weightcache/engines, and those whose launcher left a status.

roles: starting, standby (ready to take over), promoting, active (takes requests), retiring (lets its requests end),
parked (ready, and not to take over: somebody parked it, or a more important engine has the GPU), down (no launcher).

FOR is how long the slot has had its role, PID the engine's main process, MEMORY what its ranks take on GPUs, TOOK how
long its last promotion took, WHY what caused that: start, death (of the engine before), promote, wake."""

EPILOG = """\
exit status:
  0   every engine is active in one of its slots, or parked
  1   some engine is not"""

CHECK = """\
Read the file of one engine, and say what its slots would run. Nothing is started or asked."""

SETUP = """\
Write the drop-ins of one engine's units, from its file: where its socket listens, and that both slots share it. Then
print the commands that start the engine. Run it again after listen or drain_seconds were changed."""

MEASURED = "what is free when the first engine starts, less the reserve"
HEADER = ("ENGINE", "SLOT", "ROLE", "FOR", "PID", "PRIORITY", "MEMORY", "TOOK", "WHY", "LISTEN", "MODEL")
RIGHT = ("FOR", "PID", "PRIORITY", "MEMORY", "TOOK")
COLOURS = {"active": "green", "standby": "green", "down": "red", "parked": "yellow", "retiring": "yellow"}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command group."""
    text = "engines that share a port with a standby"
    group = commands.add_parser("engines", help=text, description=DESCRIPTION, epilog=EPILOG)
    group.add_argument("--json", action="store_true", help='print one JSON object with "schema": 1')
    add_global(group)
    group.set_defaults(run=_list, parser=group)
    actions = group.add_subparsers(title="actions", dest="action", metavar="ACTION")
    check = actions.add_parser("check", help="what an engine's slots would run", description=CHECK)
    setup = actions.add_parser("setup", help="write the drop-ins of an engine's units", description=SETUP)
    setup.add_argument("--root", type=as_path, default=Path("/"), metavar="DIR", help="write below DIR (default: /)")
    setup.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    for parser, run in ((check, _check), (setup, engines_setup.run)):
        parser.add_argument("engine", metavar="NAME", help="its name: the file is NAME.toml")
        add_global(parser)
        parser.set_defaults(run=run, parser=parser)


def directory(options: argparse.Namespace) -> Path:
    """Where launchers of engines keep their files."""
    chosen: Path | None = options.runtime_dir
    return EnginePaths.of("").directory if chosen is None else chosen / "engines"


def paths(options: argparse.Namespace) -> EnginePaths:
    """The files of the engine that was named. Raises UsageError."""
    return EnginePaths(directory(options), engine_name(options.engine))


def _list(options: argparse.Namespace) -> int:
    views = engines_memory.measured(listing.all_engines(directory(options)))
    if options.json:
        print(json.dumps({"schema": 1, "engines": records.to_plain(views)}, indent=2))
    elif views:
        print("\n".join(_lines(views)))
    else:
        print(f"wcache: note: no engine has a file in {config_dir()}", file=sys.stderr)
    return 0 if all(view.parked or view.slot_in("active", "parked") for view in views) else 1


def _lines(views: tuple[EngineView, ...]) -> list[str]:
    rows = [(view, slot) for view in views for slot in view.slots]
    lines = table(HEADER, [_row(view, slot) for view, slot in rows], RIGHT)
    if coloured(sys.stdout):
        for place, (_, slot) in enumerate(rows, 1):
            if colour := COLOURS.get(slot.role):
                lines[place] = paint(lines[place], slot.role, colour)
    for view in views:
        if view.problem:
            lines.append(f"{view.engine}: {escape(view.problem)}")
        lines += [f"{view.engine}-{slot.slot}: {escape(slot.problem)}" for slot in view.slots if slot.problem]
    return lines


def _row(view: EngineView, slot: SlotView) -> tuple[str, ...]:
    status = slot.status
    last = status.promotions[-1] if status and status.promotions else None
    return (
        view.engine,
        slot.slot,
        slot.role,
        "-" if status is None or slot.role == "down" else duration(time.time() - status.since),
        str(status.main.pid) if status and status.main else "-",
        str(view.priority),
        "-" if status is None or status.memory is None else size(status.memory),
        f"{last.seconds:.2f} s" if last else "-",
        last.cause if last else "-",
        escape(view.listen) or "-",
        escape(view.model) or "-",
    )


def _check(options: argparse.Namespace) -> int:
    config = engine_config.load(options.engine)
    engine, standby = config.engine, config.standby
    units = [engines_setup.service(SlotName(config.name, slot)) for slot in ("a", "b")]
    facts = {
        "file": str(config.path),
        "listens": f"{config.listen}, by {engines_setup.listener(config.name)}",
        "runs": f"{' and '.join(units)}: {command_lines.shown(['wcache-launch', '--wcache-slot', 'SLOT'])}",
        "SGLang": command_lines.shown(config.sglang),
        "python": engine.python or "as the launcher chooses",
        "environment": ", ".join(sorted(engine.environment)) or "nothing is added",
        "priority": str(engine.priority),
        "without": ", ".join(engine.without) or "-",
        "mismatch": engine.on_mismatch,
        "KV memory": f"{standby.kv_gigabytes:g} GiB of each GPU" if standby.kv_gigabytes else MEASURED,
        "unproven": "kinds of KV memory that no run on a GPU has shown are taken, too" if standby.unproven else "no",
        "reserve": f"{standby.reserve_gigabytes:g} GiB of each GPU are left to the standby",
        "limits": f"wait {engine.wait_seconds:g} s, hang {standby.hang_seconds:g} s, "
        f"drain {standby.drain_seconds:g} s, own {standby.own_seconds:g} s",
    }
    width = max(map(len, facts)) + 2
    print("\n".join(f"{name:<{width}}{escape(value)}" for name, value in facts.items()))
    return 0
