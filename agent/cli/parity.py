"""`wcache parity`: prove, before trusting it, that a model attached is the model loaded from disk."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import paths, records
from weightcache.cli import ranks
from weightcache.cli.attach import loader_command, loader_environment, run_command
from weightcache.cli.parsing import Parser, add_global
from weightcache.engine import evidence
from weightcache.errors import ProtocolError, UsageError
from weightcache.text import escape

if TYPE_CHECKING:
    from weightcache.parity.verdict import Verdict

USER = "weightcache-loader"
LOADER_HOME = Path("/var/cache/weightcache")
_MAX_RESULT = 256 << 20

DESCRIPTION = """\
Start SGLang from disk, then an agent that loads the model, then SGLang attached to it, one after the other and for this
comparison alone, with the loader's command (loader.command). Compare everything that is reachable from the model: every
tensor bit by bit, which names are one object, what overlaps in memory, plain values; then the greedy tokens and log
probabilities of fixed prompts. Needs as much free memory as the model twice, and the time of three starts.

A checkpoint may bring code along: for root, all of this runs as the user weightcache-loader where there is one, or as
--user NAME, and only what it found is recorded by root.

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
    parser.add_argument("--user", metavar="NAME", help=f"as root: run SGLang as this user (default: {USER})")
    parser.add_argument("--seconds", metavar="SECONDS", help="longest time for one start (default: 3600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("model", metavar="MODEL", help="as SGLang's --model-path")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="more of SGLang's arguments")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the comparison in the loader's environment, print and record what it found; returns its exit status."""
    config = ranks.open_site(options).require_config()
    environment = loader_environment(config)
    known = Path(environment.get(evidence.VARIABLE) or paths.EVIDENCE_FILE)  # where the loader reads it
    if options.record:
        evidence.check_writable(known)  # before three starts, not after
    own = ["--keep", options.keep] if options.keep is not None else []
    own += ["--seconds", options.seconds] if options.seconds is not None else []
    command = loader_command(config, "parity", "--json", *own, "--", "--model-path", options.model, *options.arguments)
    user = _user(options.user)
    with tempfile.TemporaryFile() as output, _home(user) as variables:
        status = run_command(command, environment | variables | config.loader.environment, output, user)
        output.seek(0)
        text = output.read(_MAX_RESULT)
    if not text and status:
        return status
    verdict = _verdict(text)
    if options.json:
        print(json.dumps(verdict.plain()), flush=True)
    else:
        print("\n".join(map(escape, verdict.text().splitlines())), flush=True)
    if options.record and not status and not verdict.broken:
        _record(known, options.model, verdict)
    return status


def _verdict(text: bytes) -> Verdict:
    from weightcache.parity.verdict import Verdict  # and with it HTTP, which no other command needs

    try:
        return records.from_plain(Verdict, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"loader.command: no result of a comparison ({error})") from None


def _record(path: Path, model: str, verdict: Verdict) -> None:
    how = "" if verdict.deterministic else ", answers not compared"
    run = f"{model}, SGLang {verdict.sglang_version}, {time.strftime('%Y-%m-%d')}{how}"
    new = evidence.record(path, verdict.methods, verdict.sglang_version, verdict.capability, run)
    print(f"parity: {len(new)} methods recorded in {path}", file=sys.stderr, flush=True)


def _user(name: str | None) -> pwd.struct_passwd | None:
    """Who runs the comparison instead of this user, which only root can have. Raises UsageError."""
    try:
        user = pwd.getpwnam(name or USER)
    except KeyError:
        if name:
            raise UsageError(f"--user {name}: there is no such user") from None
        user = None
    if user is not None and user.pw_uid == os.geteuid():
        return None
    if os.geteuid():
        if name:
            raise UsageError(f"--user {name}: only root can run a comparison as somebody else")
        return None
    if user is None:
        print(f"wcache: there is no user {USER}: code of the checkpoint runs as root", file=sys.stderr, flush=True)
    return user


@contextlib.contextmanager
def _home(user: pwd.struct_passwd | None) -> Iterator[dict[str, str]]:
    """The variables of ``user``: where it may write, caches in the home of loads, the rest in a directory for now."""
    if user is None:
        yield {}
        return
    directory = tempfile.mkdtemp(prefix="wcache-")
    try:
        os.chown(directory, user.pw_uid, user.pw_gid)
        caches = LOADER_HOME
        home = str(caches) if caches.is_dir() and caches.stat().st_uid == user.pw_uid else directory
        names = {"HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": directory, "XDG_RUNTIME_DIR": directory}
        yield {**names, "USER": user.pw_name, "LOGNAME": user.pw_name}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
