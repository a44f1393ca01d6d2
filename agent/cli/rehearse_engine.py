"""The engine of a rehearsal: wcache-launch on a loopback port with a key of its own, asked until its kernels exist."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcache.errors import LoadFailed, UsageError, WeightcacheError, tree
from weightcache.launch.processes import Tree
from weightcache.launch.server_only import without
from weightcache.parity import ending
from weightcache.parity.loopback import FAILURES, HOST, Client
from weightcache.sglang_options import given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POLL_SECONDS = 0.2
LINE_SECONDS = 10.0
END_SECONDS = 15.0
"""SGLang finishes what it serves, which is nothing or of no use; then it is killed."""
WITHOUT = "graphs,warmup,workers"
"""Levers that would leave something uncompiled: every graph is to be captured, and the warm-up to happen, now."""

# Not -m: where packages installed it, only the programs know where weightcache is.
_LAUNCH = "import sys; sys.path[:] = {path!r}; from weightcache.launch.main import main; sys.exit(main())"
_OWN = "weightcache: "
_TAIL_LINES = 12
_MOST_LOG = 16 << 20
_MOST_LINE = 4096
_MOST_YAML = 1 << 20
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. ``options`` are wcache-launch's own, ``tokens`` the most of KV memory."""

    arguments: tuple[str, ...]
    options: tuple[str, ...]
    tokens: int
    seconds: float
    """How long all of it may take."""


class Engine:
    """A server that answers ``client``."""

    def __init__(self, client: Client, log: Path, deadline: float) -> None:
        self.client = client
        self._log = _Log(log)
        self._deadline = deadline
        self._word = ""

    def exercise(self, say: Callable[[str], None]) -> None:
        """Ask for what makes kernels compile: a prompt, one that fills a prefill chunk, several at once.

        Raises LoadFailed.
        """
        try:
            info = self._json("GET", "/server_info")
            generates = bool(self._json("GET", "/model_info").get("is_generation", True))
            for name, body in _requests(info, generates):
                began = time.monotonic()
                self._json("POST", "/generate" if generates else "/encode", body)
                say(f"{name}: {time.monotonic() - began:.1f} s")
        except (*FAILURES, TypeError) as error:
            raise LoadFailed(f"the engine gave no answer ({error}): {self.tail()}") from None

    def news(self) -> list[str]:
        """What wcache-launch itself has said since the last call."""
        new = [line.removeprefix(_OWN) for line in self._log.new() if line.startswith(_OWN)]
        self._word = (new or [self._word])[-1]
        return new

    def why(self) -> str:
        """The last that wcache-launch said, which is why it ended; that the server ended needs the end of the log."""
        self.news()
        if self._word and "the server ended" not in self._word:
            return self._word
        return f"{self._word}; {self.tail()}" if self._word else self.tail()

    def tail(self) -> str:
        """The end of its log, as part of a sentence."""
        self._log.new()
        return "; ".join(line.strip() for line in self._log.last if line.strip())

    def _json(self, verb: str, path: str, body: object = None) -> dict[str, Any]:
        seconds = max(1.0, self._deadline - time.monotonic())
        answer = json.loads(self.client.ask(verb, path, body, seconds=seconds))
        return answer if isinstance(answer, dict) else {}


class _Log:
    """A file that grows: read once, a part at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self.last: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    def new(self) -> list[str]:
        """The lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_LOG)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
        self._partial = self._partial[-_MOST_LINE:]
        lines = [line[-_MOST_LINE:].decode(errors="replace") for line in whole]
        self.last.extend(lines)
        return lines


def _requests(info: dict[str, Any], generates: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Prompts of token numbers that any vocabulary has. None may be so long that the server refuses it."""

    def number(name: str, default: int) -> int:
        value = info.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def prompt(length: int, first: int) -> list[int]:
        return [first + i % 64 for i in range(length)]

    def body(ids: object, **sampling: object) -> dict[str, Any]:
        common = {"max_new_tokens": 8, "ignore_eos": True}
        return {"input_ids": ids, **({"sampling_params": {**common, **sampling}} if generates else {})}

    longest = min(number("max_req_input_len", 1024), number("max_total_num_tokens", 1024)) - 32
    chunk = number("chunked_prefill_size", 8192)
    yield "a short prompt", body(prompt(16, 100), temperature=0)
    # A little more than a chunk: what is left of it is computed upon cached tokens, by another kernel.
    length = min(chunk + 64, longest)
    if length > 16:
        yield f"a prompt of {length} tokens", body(prompt(length, 200), temperature=0)
    if longest >= _BATCH * 32:
        batch = [prompt(16, 300 + 64 * i) for i in range(_BATCH)]
        yield f"{_BATCH} prompts at once", body(batch, temperature=0.8, top_p=0.9, top_k=20)


@contextlib.contextmanager
def running(plan: Plan, folder: Path, say: Callable[[str], None], beat: Callable[[], str]) -> Iterator[Engine]:
    """The engine, once it answers; nothing is left of it after the block.

    ``beat`` adds to the line that is printed while this waits. Raises the error that wcache-launch ended with.
    """
    deadline = time.monotonic() + plan.seconds
    client, log = Client(), folder / "engine.log"
    engine = Engine(client, log, deadline)
    # SGLang takes its key from the command line, which everybody may read, or from the file of --config.
    arguments = _with_key(without(plan.arguments), client.key, folder / "engine.yaml")
    server = ["--host", HOST, "--port", str(client.port), "--max-total-tokens", str(plan.tokens)]
    command = [sys.executable, "-c", _LAUNCH.format(path=sys.path), "--wcache-without", WITHOUT, *plan.options]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--", *arguments, *server, "--tokenizer-worker-num", "1"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C comes here, and is passed on in order
            # Whoever kills this command ends wcache-launch by it, and that its engine. An engine that is asked to end
            # would finish its requests first, for nobody.
            preexec_fn=functools.partial(ending.with_parent, signal.SIGKILL),
        )
    held = Tree(process.pid)
    try:
        said = time.monotonic()
        while not engine.client.answers():
            for line in engine.news():
                say(line)
            held.update()
            if (status := ending.status(process.pid)) is not None:
                raise _error(status, engine)
            if time.monotonic() > deadline:
                raise LoadFailed(f"the engine did not answer within {plan.seconds:g} s: {engine.tail()}")
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                say(f"waiting for the server{beat()}")
            with ending.wait():
                time.sleep(POLL_SECONDS)
        for line in engine.news():
            say(line)
        yield engine
    finally:
        held.update()
        _end(process, held)


def _end(process: subprocess.Popen[bytes], held: Tree) -> None:
    """In order if it ends in time, by SIGKILL else; signals do not interrupt this."""
    if ending.status(process.pid) is None:
        os.kill(process.pid, signal.SIGTERM)  # nobody has waited for it, so that the number is still its own
    if ending.status(process.pid, END_SECONDS) is None or not held.wait(END_SECONDS):
        held.kill(END_SECONDS)
    held.close()
    ending.kill_group(process.pid)  # whoever left the tree is still in its session
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def _error(status: int, engine: Engine) -> WeightcacheError:
    """An error with the exit status that wcache-launch ended with, and its last words."""
    known = {cls.exit_status: cls for cls in reversed(list(tree()))}
    return known.get(status, LoadFailed)(f"no rehearsal: {engine.why() or f'wcache-launch ended with {status}'}")


def _with_key(arguments: Sequence[str], key: str, file: Path) -> list[str]:
    """``arguments`` with a --config file that holds the keys, besides what the operator's own holds.

    Raises UsageError.
    """
    own, rest = "", list(arguments)
    for i, token in enumerate(rest):
        name, equals, value = token.partition("=")
        if name == "--config":
            path = Path(value if equals else "".join(rest[i + 1 : i + 2]))
            del rest[i : i + (1 if equals else 2)]
            try:
                with path.open(encoding="utf-8") as opened:
                    own = opened.read(_MOST_YAML)
            except (OSError, ValueError):
                raise UsageError(f"--config {path} cannot be read") from None
            if given(arguments).opaque:
                raise UsageError(
                    f"--config {path} holds more than lines of key: value, and a rehearsal adds its own key as one: "
                    "give what it says as arguments"
                )
            break
    own = "\n".join(line for line in own.splitlines() if not re.match(r"(admin[-_])?api[-_]key\s*:", line))
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as opened:
        opened.write(f"{own}\napi-key: {json.dumps(key)}\nadmin-api-key: {json.dumps(key)}\n".lstrip())
    return ["--config", str(file), *rest]
