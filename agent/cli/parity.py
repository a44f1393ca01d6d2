"""`wcache parity`: prove, before trusting it, that a model attached is the model loaded from disk."""

from __future__ import annotations

import argparse

from weightcache.cli import ranks
from weightcache.cli.attach import loader_command, loader_environment, run_command
from weightcache.cli.parsing import Parser, add_global

DESCRIPTION = """\
Start SGLang from disk, then an agent that loads the model, then SGLang attached to it, one after the other and for this
comparison alone, with the loader's command (loader.command). Compare everything that is reachable from the model: every
tensor bit by bit, which names are one object, what overlaps in memory, plain values; then the greedy tokens and log
probabilities of fixed prompts. Needs as much free memory as the model twice, and the time of three starts.

Methods of quantization that are not in weightcache's own evidence are refused by loaders until a comparison of yours
allows them: --record. Options stand before MODEL; what follows it is SGLang's."""

EPILOG = """\
examples:
  wcache parity /srv/models/llama --mem-fraction-static 0.4
  wcache parity --record /srv/models/llama-awq --mem-fraction-static 0.4

exit status:
  0   equal
  1   something differs, or a start failed"""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    text = "compare a model attached with the model loaded from disk"
    parser = commands.add_parser("parity", help=text, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--record", action="store_true", help="if equal, allow these methods on this kind of device")
    parser.add_argument("--keep", metavar="DIR", help="leave logs and inventories in this new directory")
    parser.add_argument("--seconds", metavar="SECONDS", help="longest time for one start (default: 3600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("model", metavar="MODEL", help="as SGLang's --model-path")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="more of SGLang's arguments")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the comparison in the loader's environment; its exit status is passed on."""
    config = ranks.open_site(options).require_config()
    own = ["--record"] * options.record + ["--json"] * options.json
    own += ["--keep", options.keep] if options.keep is not None else []
    own += ["--seconds", options.seconds] if options.seconds is not None else []
    command = loader_command(config, "parity", *own, "--", "--model-path", options.model, *options.arguments)
    return run_command(command, loader_environment(config))
