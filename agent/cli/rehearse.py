"""`wcache rehearse`: one throw-away engine, so that the first one in production finds its kernels compiled."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_wait
from weightcache.compiled import stamp
from weightcache.compiled.entry import Entry, Measured, rehearsed, remember
from weightcache.compiled.store import of_user
from weightcache.compiled.written import Written
from weightcache.config_checks import model_path
from weightcache.errors import ConfigError, UsageError
from weightcache.launch import interpreter, layout
from weightcache.sglang_options import given
from weightcache.text import count, duration, escape, size

if TYPE_CHECKING:
    from weightcache.monitor.site import Site

SECONDS = 3600.0

DESCRIPTION = """\
Start SGLang once with the configured model, or with the arguments after --, through wcache-launch, on the weights that
the agents hold: on a loopback port that nobody else can use, with little KV memory. Ask it for a short prompt, for one
that fills a prefill chunk and for several at once, end it, and say what was compiled meanwhile. The next engine of this
user in this environment finds those kernels (docs/compiled.md).

Run it as the user who starts the engines, and with the same environment: that is whose kernels they are."""

EPILOG = """\
examples:
  wcache rehearse                                  the configured model
  wcache rehearse -- --model-path /srv/models/llama --tp-size 4
  wcache rehearse --once --wait 3600               for a unit: wait for the load, do nothing where nothing changed

exit status:
  0   rehearsed, or nothing to do
  1   refused (no weights, too little memory), or the engine failed
  75  a load is under way"""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    text = "start an engine once, so that its kernels are compiled before production needs them"
    parser = commands.add_parser("rehearse", help=text, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--once", action="store_true", help="do nothing if the same was rehearsed in this environment")
    parser.add_argument("--from-disk", action="store_true", help="also without resident weights: a copy from disk")
    parser.add_argument(
        "--seconds", type=_positive, default=SECONDS, help="longest time for the engine (default: 3600)"
    )
    add_wait(parser, "how long to wait for weights that are not there yet (default: 0)", 0.0)
    parser.add_argument("--python", metavar="FILE", default="", help="the Python that has SGLang (as --wcache-python)")
    parser.add_argument("--json", action="store_true", help="print one JSON object; what happens goes to stderr")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ...", help="SGLang's arguments instead")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Rehearse, and return the exit status."""
    from weightcache.parity import ending

    site = ranks.open_site(options)
    config = site.require_config()
    arguments = _arguments(site, options.arguments)
    python = interpreter.choose(options.python, config)
    wanted = stamp.of(python)
    try:
        with ending.orderly(), of_user().hold(wanted, os.environ) as held:
            ending.with_parent(0)  # a shell that ends is no reason to
            return _rehearse(options, site, arguments, python, held.entry)
    except ending.Ended as ended:
        print(f"wcache: {ended}", file=sys.stderr, flush=True)
        return ended.status


def _rehearse(options: argparse.Namespace, site: Site, arguments: tuple[str, ...], python: str, entry: Entry) -> int:
    from weightcache.cli import rehearse_engine, rehearse_ready  # and with them HTTP, which no other command needs

    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:32]
    if options.once and digest in rehearsed(entry):
        return _report(options, entry, "already", 0.0, Measured())
    views = rehearse_ready.weights(site, bool(options.arguments), options.from_disk, options.wait)
    tokens, room = rehearse_ready.tokens(site, views, arguments)
    if room is None:
        _say(options, "how much memory is free is not known: not checked")
    written, began = Written(entry, os.environ), time.monotonic()

    def say(line: str) -> None:
        _say(options, line)

    def beat() -> str:
        return f", {time.monotonic() - began:.0f} s, {count(written.since().files, 'new file')} so far"

    say(f"starting SGLang with at most {tokens} tokens of KV memory")
    plan = rehearse_engine.Plan(arguments, _own_options(site, options, python), tokens, options.seconds)
    with (
        tempfile.TemporaryDirectory(prefix="wcache-rehearse-") as folder,
        rehearse_engine.running(plan, Path(folder), say, beat) as engine,
    ):
        say(f"the server answers after {duration(time.monotonic() - began)}")
        engine.exercise(say)
    new = written.since()
    remember(entry, digest)
    return _report(options, entry, "compiled" if new.files else "nothing", time.monotonic() - began, new)


def _arguments(site: Site, after: list[str]) -> tuple[str, ...]:
    """SGLang's arguments: those after ``--``, or the configured model's with its layout. Raises a WeightcacheError."""
    if after:
        if after[0] != "--":
            raise UsageError(f"unexpected argument {after[0]!r}: SGLang's arguments stand after --")
        arguments = tuple(after[1:])
        nodes = layout.deployment(given(arguments)).node_count
    else:
        if site.config.model is None:
            file = site.config.path or "the configuration"
            raise ConfigError(f"{file}: no [model] is configured: give SGLang's arguments after --")
        arguments = (*site.config.model.arguments, *site.config.deployment.arguments(site.node))
        nodes = site.config.deployment.node_count
    if nodes > 1:
        raise UsageError("a rehearsal starts one engine on one host, and this deployment has several nodes")
    if model_path(arguments) is None and given(arguments).text("model_path") == "":
        raise UsageError("--model-path is missing: which model should be rehearsed?")
    return arguments


def _own_options(site: Site, options: argparse.Namespace, python: str) -> tuple[str, ...]:
    """What wcache-launch is told: attach, or, if that was asked for, load from disk."""
    reaction = "fallback" if options.from_disk else "error"
    result = ["--wcache-on-mismatch", reaction, "--wcache-runtime-dir", str(site.directory), "--wcache-python", python]
    result += ["--wcache-config", str(site.config.path)] if site.config.path else []
    return tuple(result)


def _say(options: argparse.Namespace, line: str) -> None:
    print(f"rehearse: {escape(line)}", file=sys.stderr if options.json else sys.stdout, flush=True)


def _report(options: argparse.Namespace, entry: Entry, outcome: str, seconds: float, new: Measured) -> int:
    if options.json:
        plain = {"outcome": outcome, "seconds": round(seconds, 1), "files": new.files, "bytes": new.bytes}
        print(json.dumps({"schema": 1, **plain, "stamp": entry.stamp, "directory": str(entry.directory)}), flush=True)
        return 0
    took = duration(seconds)
    sentences = {
        "already": "the same was rehearsed in this environment before: nothing to do",
        "nothing": f"nothing had to be compiled ({took})",
        "compiled": f"compiled {count(new.files, 'file')}, {size(new.bytes)}, in {took}: {entry.directory}",
    }
    _say(options, sentences[outcome])
    return 0


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10_000_000:
        raise argparse.ArgumentTypeError(f"expected seconds, not {text!r}")
    return value
