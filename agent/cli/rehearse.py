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
from typing import TYPE_CHECKING, Any

from weightcache import paths
from weightcache.cli import ranks, rehearse_room
from weightcache.cli.parsing import Parser, add_global, add_wait
from weightcache.compiled import places, stamp, store
from weightcache.config_checks import model_path
from weightcache.errors import (
    AgentUnavailable,
    ConfigError,
    Degraded,
    Drained,
    Empty,
    NotReady,
    StillLoading,
    UsageError,
    WeightcacheError,
)
from weightcache.launch import interpreter, layout
from weightcache.launch.sglang_options import given
from weightcache.monitor.site import choose_ranks
from weightcache.text import count, duration, escape, size

if TYPE_CHECKING:
    from weightcache.monitor.site import Site
    from weightcache.monitor.view import RankView

SECONDS = 3600.0
POLL_SECONDS = 1.0
MARKER = "rehearsed.json"

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
    from weightcache.cli import rehearse_engine  # and with them HTTP, which no other command needs
    from weightcache.parity import ending

    site = ranks.open_site(options)
    config = site.require_config()
    arguments = _arguments(site, options.arguments)
    python = interpreter.choose(options.python, config)
    wanted = stamp.of(python)
    try:
        with ending.orderly(), store.open_store(paths.cache_dir()).hold(wanted, os.environ) as held:
            ending.with_parent(0)  # a shell that ends is no reason to
            if options.once and _rehearsed(held.entry, arguments):
                return _report(options, {"outcome": "already", "seconds": 0.0, "files": 0, "bytes": 0}, held.entry)
            backend, room = _room(site, options, arguments)
            asked = _asked_tokens(arguments)
            layout_ = layout.deployment(given(arguments))
            bytes_ = rehearse_room.token_bytes(model_path(arguments) or "", layout_.tp_size, layout_.pp_size)
            tokens = rehearse_room.tokens(room, backend, bytes_, asked)
            if room is None:
                _say(options, "how much memory is free is not known: not checked")
            before = _files(held.entry)
            began = time.monotonic()

            def beat() -> str:
                new, _ = _added(held.entry, before)
                return f", {time.monotonic() - began:.0f} s, {count(new, 'new file')} so far"

            plan = rehearse_engine.Plan(arguments, _own_options(site, options, python), tokens, options.seconds)
            _say(options, f"starting SGLang with at most {tokens} tokens of KV memory")
            with tempfile.TemporaryDirectory(prefix="wcache-rehearse-") as folder:

                def say(line: str) -> None:
                    _say(options, line)

                with rehearse_engine.running(plan, Path(folder), say, beat) as engine:
                    _say(options, f"the server answers after {duration(time.monotonic() - began)}")
                    engine.exercise(say)
            files, added = _added(held.entry, before)
            _mark(held.entry, arguments)
            outcome = "compiled" if files else "nothing"
            result = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "files": files, "bytes": added}
            return _report(options, result, held.entry)
    except ending.Ended as ended:
        print(f"wcache: {ended}", file=sys.stderr, flush=True)
        return ended.status


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


def _room(site: Site, options: argparse.Namespace, arguments: tuple[str, ...]) -> tuple[str, rehearse_room.Room | None]:
    """The kind of memory, and how much is free where this launch's ranks are. Raises if their weights are not there."""
    deadline = time.monotonic() + options.wait
    while True:
        try:
            views = _ready(site, options)
            break
        except (NotReady, AgentUnavailable):
            if time.monotonic() >= deadline:
                raise
            _pause()
    backend = next((view.status.backend for view in views), site.config.memory.backend)
    if backend == "cuda":
        gpus = {view.status.gpu_uuid for view in views} or {gpu for rank in site.ranks if (gpu := site.gpu(rank))}
        return backend, rehearse_room.free_on_gpus(gpus) if gpus else None
    return backend, rehearse_room.free_on_host(len(layout.ranks(given(arguments))))


def _ready(site: Site, options: argparse.Namespace) -> list[RankView]:
    """The ranks that hold weights: all of them, or, with arguments of the operator's, at least one."""
    try:
        views = ranks.query_all(site, choose_ranks(site, None))
    except AgentUnavailable:
        if options.from_disk:
            return []
        raise
    ready = [view for view in views if view.agent == "up" and view.status.state == "ready"]
    if options.from_disk or len(ready) == len(views) or (options.arguments and ready):
        return ready
    raise _refusal(next(view for view in views if view not in ready))


def _refusal(view: RankView) -> WeightcacheError:
    rank, state = view.status.rank, view.status.state
    if view.agent != "up":
        why = view.reason.message if view.reason is not None else "no agent answers"
        return AgentUnavailable(f"no rehearsal: rank {rank}: {why}")
    kind = {"loading": StillLoading, "empty": Empty, "drained": Drained, "degraded": Degraded}.get(state, NotReady)
    return kind(f"no rehearsal: rank {rank} is {state}, and a second copy from disk was not asked for (--from-disk)")


def _pause() -> None:
    from weightcache.parity import ending

    with ending.wait():
        time.sleep(POLL_SECONDS)


def _asked_tokens(arguments: tuple[str, ...]) -> int | None:
    for i, token in enumerate(arguments):
        name, equals, value = token.partition("=")
        if name == "--max-total-tokens":
            text = value if equals else "".join(arguments[i + 1 : i + 2])
            return int(text) if text.isascii() and text.isdigit() and int(text) else None
    return None


def _files(entry: store.Entry) -> dict[Path, int]:
    """What compilers have written so far, with the times of their last change."""
    folders = (entry.directory, *places.elsewhere(os.environ, entry.stay))
    found: dict[Path, int] = {}
    for folder in folders:
        for path in store.walk(folder):
            try:
                found[path] = path.lstat().st_size
            except OSError:
                continue
    return found


def _added(entry: store.Entry, before: dict[Path, int]) -> tuple[int, int]:
    new = [length for path, length in _files(entry).items() if path not in before]
    return len(new), sum(new)


def _digest(arguments: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:32]


def _rehearsed(entry: store.Entry, arguments: tuple[str, ...]) -> bool:
    return _digest(arguments) in store.remembered(entry, MARKER)


def _mark(entry: store.Entry, arguments: tuple[str, ...]) -> None:
    store.remember(entry, MARKER, _digest(arguments))


def _say(options: argparse.Namespace, line: str) -> None:
    print(f"rehearse: {escape(line)}", file=sys.stderr if options.json else sys.stdout, flush=True)


def _report(options: argparse.Namespace, result: dict[str, Any], entry: store.Entry) -> int:
    if options.json:
        print(json.dumps({"schema": 1, **result, "stamp": entry.stamp, "directory": str(entry.directory)}), flush=True)
        return 0
    took = duration(result["seconds"])
    sentences = {
        "already": "the same was rehearsed in this environment before: nothing to do",
        "nothing": f"nothing to compile, all was there ({took})",
        "compiled": f"compiled {count(result['files'], 'file')}, {size(result['bytes'])}, in {took}: {entry.directory}",
    }
    _say(options, sentences[result["outcome"]])
    return 0


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10_000_000:
        raise argparse.ArgumentTypeError(f"expected seconds, not {text!r}")
    return value
