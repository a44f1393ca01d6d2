"""`wcache`: arguments, the choice of the command, and one sentence with an exit status for whatever goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import weightcache
from weightcache import keeper, protocol
from weightcache.cli import (
    attach,
    caches,
    config_command,
    control,
    deployment,
    doctor,
    engines,
    engines_verbs,
    leave,
    load,
    metrics,
    parity,
    rehearse,
    starts,
    status,
)
from weightcache.cli.parsing import Parser, add_global, unknown

Command = Callable[..., int]

DESCRIPTION = """\
Ask the weightcache agents of this host: what they hold, who uses it, and what to do next.
Engines do not attach through this command: start them with wcache-launch."""

EPILOG = """\
examples:
  wcache status                        one line a rank, its sets and the engines attached
  wcache status --json | jq .ranks     the same for programs ("schema": 1)
  wcache ranks                         which ranks of the deployment are this host's, and on which GPUs
  wcache load --wait 600               load the configured model now and wait for it
  wcache attach --check                map what is resident without an engine and compare its digests
  wcache drain --rank 1 --wait 300     stop giving out rank 1's weights, wait for its engines, free them
  wcache config set memory.backend host
  wcache engines                       which engines are active, and which stand by
  wcache promote NAME                  let an engine's standby take over
  wcache starts show                   what the last start of an engine spent its time on
  wcache rehearse                      have an engine's kernels compiled before one is needed
  wcache caches                        which compiled kernels are kept
  wcache doctor                        what is missing on this machine, and what to do about it

exit status:
  0    done; for status: every rank is ready        70   internal error
  1    refused or failed; for status: some rank     74   the output could not be written
       is not ready                                 75   a load is under way: try again later
  2    the command line makes no sense              76   not the same protocol on both sides
  66   the checkpoint is missing or damaged         77   this user may not do that
  69   no agent answers, or no such device          78   the configuration is wrong
  130  interrupted                                  141  nobody reads the output any more

environment:
  WEIGHTCACHE_RUNTIME_DIR   directory of the sockets, where neither option nor configuration names one
  WEIGHTCACHE_STATE_DIR     directory of what launches remember, where it is not ~/.local/state/weightcache
  WEIGHTCACHE_ENGINES_DIR   directory of the files that describe engines, where it is not /etc/weightcache/engines
  WEIGHTCACHE_NODE_RANK     which of deployment.nodes this host is, where its names and addresses do not say so
  WEIGHTCACHE_TRACEBACK=1   show where in the program an error came from
  NO_COLOR                  never use colour"""


def parser() -> Parser:
    """The whole command line."""
    top = Parser(prog="wcache", description=DESCRIPTION, epilog=EPILOG)
    add_global(top, top=True)
    top.add_argument("--version", action="version", version=_version(), help="print the version and leave")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for module in (
        status,
        load,
        deployment,
        attach,
        control,
        config_command,
        engines,
        engines_verbs,
        parity,
        rehearse,
        caches,
        doctor,
        metrics,
        starts,
    ):
        module.register(commands)
    text = "keep weights over an agent's crashes without systemd"
    command = commands.add_parser("keeper", help=text, description=keeper.DESCRIPTION)
    keeper.add_arguments(command)
    command.set_defaults(run=keeper.start, parser=command)
    command = commands.add_parser("version", help="print the version and the protocol", description="Print versions.")
    command.set_defaults(run=lambda _: print(_version()) or 0, parser=command)
    return top


def _version() -> str:
    return f"weightcache {weightcache.__version__} (protocol {protocol.PROTOCOL}, Python {sys.version.split()[0]})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return leave.orderly("wcache", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    top = parser()
    try:
        options, extra = top.parse_known_args(argv)
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    if extra:
        raise unknown(extra, options.parser)
    status: int = options.run(options)
    return status
