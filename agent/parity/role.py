"""The ``parity`` role: is an engine that attaches the engine that a disk load gives?

Starts SGLang from disk, then an agent that loads the model, then SGLang attached to it, one after the other and all of
them for this comparison alone. Compares everything that is reachable from the model, bit by bit, and the tokens and log
probabilities that the two servers answer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import protocol, records, sglang_options
from weightcache.client import Conversation
from weightcache.engine.directive import UNPROVEN_VARIABLE, Directive
from weightcache.errors import ParityBroken, ProtocolError, UsageError
from weightcache.launch import daemon_config, detached, layout
from weightcache.parity import ending, inventory
from weightcache.parity.server import serving
from weightcache.parity.verdict import Side, judge
from weightcache.paths import RankPaths

if TYPE_CHECKING:
    from weightcache.config import RankConfig

PROMPTS = ((5, 17, 99, 234, 7), (42, 11, 200, 8), tuple(range(100, 164)))
TOKENS = 24
LOAD_SECONDS = 3600.0
_ADAPTERS = "--lora-paths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The role's options, then ``--`` and SGLang's arguments."""
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS, help="longest time for one start")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and inventories in this new directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="SGLang's arguments")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 0 when nothing differs. Raises ParityBroken, LoadFailed, UsageError and what an agent says."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    try:
        with ending.orderly():
            return _run(args, arguments)
    except ending.Ended as ended:
        with contextlib.suppress(OSError):  # a terminal that hung up
            print(f"weightcache-loader: {ended}", file=sys.stderr, flush=True)
        return ended.status


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    backend, ranks = _layout(arguments)
    # A directory of its own for the sockets, since their paths are short.
    with _directory(args.keep) as directory, _temporary("wcache-") as sockets:
        comparison = _Comparison(directory, sockets, tuple(arguments), backend, ranks, args.seconds)
        disk = comparison.side("disk", from_disk="wcache parity compares with a disk load")
        with comparison.agent():
            attached = comparison.side("attached")
        result = judge(disk, attached)
        (directory / "result.json").write_text(json.dumps(result.plain(), indent=1) + "\n")
        print(json.dumps(result.plain()) if args.json else result.text(), flush=True)
    if result.broken:
        raise ParityBroken(result.broken)
    return 0


def _layout(arguments: Sequence[str]) -> tuple[str, Sequence[RankConfig]]:
    given = sglang_options.given(arguments)
    if not given.text("model_path"):
        raise UsageError("parity needs a model: wcache parity MODEL [SGLang's arguments]")
    backend, ranks = layout.rank_configs(given)
    if len(ranks) != 1:
        raise UsageError(f"parity compares one rank so far, and these arguments make {len(ranks)}")
    return backend, ranks


def adapters(arguments: Sequence[str]) -> Sequence[str]:
    """The names of the adapters that ``--lora-paths`` gives: of NAME=PATH, PATH, or JSON."""
    if _ADAPTERS not in arguments:
        return ()
    given = itertools.takewhile(lambda entry: not entry.startswith("-"), arguments[arguments.index(_ADAPTERS) + 1 :])
    return [json.loads(entry)["lora_name"] if entry.startswith("{") else entry.partition("=")[0] for entry in given]


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with _temporary("wcache-parity-") as directory:
            yield directory
        return
    try:
        keep.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: cannot be made ({error.strerror})") from None
    yield keep


@contextlib.contextmanager
def _temporary(prefix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        yield Path(name)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The processes of one comparison, one after the other. ``directory`` is for files, ``sockets`` for the agent."""

    directory: Path
    sockets: Path
    arguments: tuple[str, ...]
    backend: str
    ranks: Sequence[RankConfig]
    seconds: float

    def side(self, name: str, from_disk: str = "") -> Side:
        """Start one server, take its inventories, ask it, end it."""
        folder = self.directory / name
        folder.mkdir(mode=0o700)
        key = self.ranks[0].gpu or f"rank:{self.ranks[0].rank}"
        directive = Directive(
            purpose="engine",
            backend="cuda" if self.backend == "cuda" else "host",
            sockets={key: str(self._paths.public)},
            group=f"parity-{os.getpid()}-{name}",
            on_mismatch="fallback" if from_disk else "error",
            from_disk=from_disk,
            inventory=str(folder),
        )
        begin = time.monotonic()
        self._say(f"{name}: starting SGLang")
        environment = {**os.environ, **directive.environment(), "TMPDIR": self._temporary}
        environment.pop(UNPROVEN_VARIABLE, None)
        with serving(self.arguments, environment, folder / "log", self.seconds) as server:
            self._say(f"{name}: answers after {time.monotonic() - begin:.0f} s")
            questions = [(prompt, adapter) for adapter in ("", *adapters(self.arguments)) for prompt in PROMPTS]
            answers = tuple(server.answer(prompt, TOKENS, adapter) for prompt, adapter in questions)
            repeated = tuple(server.answer(prompt, TOKENS, adapter) for prompt, adapter in questions)
        (folder / "answers.json").write_text(json.dumps(records.to_plain((answers, repeated))) + "\n")
        found = {path.name: inventory.read(path) for path in sorted(folder.glob("rank-*.json"))}
        if not found:
            raise ProtocolError(f"SGLang took no inventory: is weightcache installed beside it? ({folder / 'log'})")
        return Side(found, answers, repeated)

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        """An agent that has loaded the model; methods without evidence included."""
        text = daemon_config.render(
            sys.executable,
            daemon_config.model_arguments(self.arguments),
            self.backend,
            self.ranks,
            environment={UNPROVEN_VARIABLE: "allow", "TMPDIR": self._temporary},
        )
        config = daemon_config.write(self.sockets, text)
        begin = time.monotonic()
        self._say("agent: loading")
        started = detached.start(self._paths, config, detached.can_keep())
        try:
            with ending.wait():
                started.wait(time.monotonic() + 30.0)
            with Conversation(self._paths.public) as conversation, ending.wait():
                conversation.request(protocol.Load(self.seconds), protocol.Loaded, self.seconds)
            self._say(f"agent: holds the weights after {time.monotonic() - begin:.0f} s")
            yield
        finally:
            detached.stop([started])
            with contextlib.suppress(OSError):
                shutil.copy(detached.log_file(self._paths), self.directory / "agent.log")

    @property
    def _temporary(self) -> str:
        """Where SGLang makes temporary files, which it does not remove when it is killed."""
        path = self.sockets / "tmp"
        path.mkdir(exist_ok=True)
        return str(path)

    @property
    def _paths(self) -> RankPaths:
        return RankPaths(self.sockets, self.ranks[0].rank)

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that hung up ends nothing here
            print(f"parity: {text}", file=sys.stderr, flush=True)
