"""`wcache attach --check`: map a resident set without an engine, in the operator's SGLang environment."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_rank
from weightcache.errors import ConfigError, UsageError
from weightcache.monitor.site import choose_ranks

if TYPE_CHECKING:
    import argparse

    from weightcache.config import Config

DESCRIPTION = """\
Map a resident set the way an engine does, without SGLang and as this user, compare its digests with those recorded
when it was published, and print bytes, tensors and milliseconds. The work is done by the loader's command
(loader.command), whose output and exit status are passed on.

Engines attach by themselves when they are started with wcache-launch."""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "attach", help="check that what is resident can be mapped (--check)", description=DESCRIPTION
    )
    parser.add_argument("--check", action="store_true", help="needed: say that a check is all that is wanted")
    add_rank(parser)
    parser.add_argument("--set", metavar="ID", help="this set (default: the newest target set)")
    parser.add_argument("--json", action="store_true", help="let the loader's command print JSON")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the check once for each rank; the exit status is the first one that is not 0."""
    if not options.check:
        raise UsageError("attach needs --check (engines attach when they are started with wcache-launch)")
    site = ranks.open_site(options)
    config = site.require_config()
    statuses = []
    for rank in choose_ranks(site, options.rank):
        extra = ["--socket", str(site.rank(rank).status), "--backend", config.memory.backend]
        gpu = next((entry.gpu for entry in config.ranks if entry.rank == rank), "")
        extra += ["--gpu", gpu] if gpu else []
        extra += ["--set", options.set] if options.set is not None else []
        extra += ["--json"] if options.json else []
        statuses.append(run_command(loader_command(config, "check", *extra), loader_environment(config)))
    return next((status for status in statuses if status), 0)


def loader_command(config: Config, *arguments: str) -> list[str]:
    """The loader's command with a role's arguments. Raises ConfigError when none is configured."""
    if not config.loader.command:
        file = config.path or "the configuration"
        raise ConfigError(f"{file}: loader.command is not set, and this needs the loader's environment")
    return [*config.loader.command, *arguments]


def loader_environment(config: Config) -> dict[str, str]:
    """This process's environment with what the configuration adds."""
    return {**os.environ, **config.loader.environment}


def run_command(command: list[str], environment: dict[str, str]) -> int:
    """Run a loader's role; its output goes to this one's, and its exit status is returned. Raises ConfigError."""
    sys.stdout.flush()
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise ConfigError(f"loader.command: {command[0]!r} cannot be started ({error.strerror})") from None
    return status if status >= 0 else 128 - status
