"""`wcache doctor`: what this machine has and lacks, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from weightcache import paths
from weightcache.cli import (
    doctor_agents,
    doctor_deployment,
    doctor_host,
    doctor_kept,
    doctor_loader,
    doctor_rights,
    doctor_systemd,
    ranks,
    systemd,
)
from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.cli.parsing import Parser, add_global
from weightcache.config import Config
from weightcache.errors import ConfigError
from weightcache.monitor.site import Site, find_ranks
from weightcache.text import coloured, count, escape, paint

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

DESCRIPTION = """\
Look at everything that has to be in place: Python, the configuration, the agents, their units and sockets, this user's
rights, the loader's command, its environment and its user, the checkpoint, memory, devices and driver; and say whose
the memory is that no process seems to own. Each line says ok, problem or note; a problem comes with what to do about
it. Nothing is changed, and no GPU is opened by this process (the loader's command looks at the GPUs, in its own
environment; it gets 120 s).

Run it as the user who has the trouble: the rights that are looked at are this user's."""

EPILOG = """\
exit status:
  0   no problem
  1   at least one problem"""

COLOURS = {"ok": "green", "problem": "red", "note": "yellow"}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor", help="what is missing on this machine, and what to do", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the findings as they come; the exit status says whether there is a problem."""
    problems = 0
    colour = coloured(sys.stdout)
    for finding in examine(options):
        problems += finding.status == "problem"
        if options.json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
        else:
            print("\n".join(_lines(finding, colour)), flush=True)
    if not options.json:
        print(count(problems, "problem") if problems else "no problem")
    return 1 if problems else 0


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """All findings, the cheap ones first."""
    yield doctor_host.python()
    try:
        site = ranks.open_site(options)
    except ConfigError as error:
        # Named on the command line and broken: what can be looked at without it is looked at all the same.
        site = Site(Config(), paths.runtime_dir(options.runtime_dir), error)
    if site.problem is not None:
        yield problem("configuration", site.problem.message, "edit the file; `wcache config check` looks again")
    elif site.config.path is None:
        yield note("configuration", f"{paths.CONFIG_FILE} does not exist: the defaults apply, and no model is loaded")
    else:
        yield ok("configuration", f"{site.config.path} is valid")
        yield from doctor_deployment.deployment(site)
    yield from doctor_agents.directory(site)
    found = find_ranks(site)
    views, units = ranks.query_all(site, found), systemd.of_ranks(site, found)
    yield from doctor_agents.agents(site, views, units)
    yield from doctor_kept.markers(site, views)
    yield from doctor_kept.suspects(views)
    yield from doctor_kept.owners(views, units)
    yield from doctor_systemd.units(views, units)
    yield from doctor_rights.sockets(site)
    yield from doctor_host.limits()
    if site.problem is None:
        yield from doctor_loader.checkpoint(site.config)
        if site.config.memory.backend == "host":
            yield from doctor_host.memory(doctor_loader.checkpoint_bytes(site.config))
        else:
            yield from doctor_host.devices(site.config)
            yield from doctor_host.libraries()
            yield from doctor_host.persistence()
        yield from doctor_rights.loader(units, *doctor_loader.needed(site.config))
        yield from doctor_loader.command(site.config)


def _lines(finding: Finding, colour: bool) -> list[str]:
    status = finding.status
    line = f"{status:<7}  {escape(finding.subject)}: {escape(finding.text)}"
    lines = [paint(line, status, COLOURS[status]) if colour else line]
    if finding.advice:
        lines.append(f"{'':<7}    -> {escape(finding.advice)}")
    return lines
