"""One SGLang server for a comparison: started, asked for tokens and their probabilities, ended with all it started."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightcache.errors import LoadFailed
from weightcache.launch.processes import Tree
from weightcache.launch.server_only import without
from weightcache.parity import ending
from weightcache.parity.loopback import FAILURES, HOST, Client

POLL_SECONDS = 0.2
ANSWER_SECONDS = 300.0
STOP_SECONDS = 20.0
TOP = 5
"""How many of the likeliest tokens are compared at each position."""

_TAIL_LINES = 12
_DRAFTS = ("spec_num_proposed_drafts", "spec_num_correct_drafts")
_KEY = "WEIGHTCACHE_PARITY_KEY"
# SGLang takes its key from the command line, which everybody may read, or from the one file of --config, which may be
# the operator's. So it comes by the environment, which only this user may read, and joins the arguments in the process.
# Both keys, since a key in the operator's file would count beside it. sys.argv is what `python -m` makes of it.
_START = (
    f"import os, runpy, sys; key = os.environ.pop('{_KEY}'); sys.argv += ['--api-key', key, '--admin-api-key', key]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The greedy tokens after one prompt, their log probabilities, and the TOP likeliest tokens at each position.

    ``drafts``: how many of a draft model's tokens the target was shown and took, empty without one. Tokens and their
    probabilities do not depend on the draft: these numbers are all that answers show of it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]
    drafts: tuple[int, ...] = field(default=(), compare=False)


@contextlib.contextmanager
def serving(arguments: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> Iterator[Server]:
    """SGLang's own server on a free loopback port, once it answers; its whole tree ends with the block.

    It answers nobody else. Raises LoadFailed with the end of its log when it ends, or takes longer than ``seconds``.
    """
    client = Client()
    command = [sys.executable, "-c", _START, *without(arguments), "--host", HOST, "--port", str(client.port)]
    command += ["--tokenizer-worker-num", "1"]  # with more of them SGLang cannot have a key
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, _KEY: client.key},
            start_new_session=True,
            # For the case that this process cannot end it; SGLang's own processes do the same.
            preexec_fn=functools.partial(ending.with_parent, signal.SIGKILL),
        )
    tree = Tree(process.pid)
    try:
        server = Server(client, log)
        _await(process, tree, server, seconds)
        yield server
    finally:
        tree.update()
        tree.kill(STOP_SECONDS)
        tree.close()
        ending.kill_group(process.pid)  # whoever left the tree is still in its session
        process.wait(STOP_SECONDS)


def _await(process: subprocess.Popen[bytes], tree: Tree, server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not server.client.answers():
        tree.update()
        if (status := ending.status(process.pid)) is not None:
            raise LoadFailed(f"SGLang ended with {status}: {server.tail()}")
        if time.monotonic() > deadline:
            raise LoadFailed(f"SGLang did not answer within {seconds:g} s: {server.tail()}")
        with ending.wait():
            time.sleep(POLL_SECONDS)


class Server:
    """A server that answers ``client``."""

    def __init__(self, client: Client, log: Path) -> None:
        self.client = client
        self._log = log

    def answer(self, prompt: Sequence[int], count: int, adapter: str = "") -> Answer:
        """``count`` greedy tokens after ``prompt``, computed from an empty prefix cache. Raises LoadFailed.

        ``adapter`` names one of those that SGLang was started with (LoRA).

        A cached prefix makes a shorter prefill, another shape and so other low-order bits: equal bits need equal work.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": TOP,
        }
        if adapter:
            body["lora_path"] = adapter
        try:
            self._flush()
            got = json.loads(self.client.ask("POST", "/generate", body, seconds=ANSWER_SECONDS))
            meta = got["meta_info"]
            rows = [entry or () for entry in meta["output_top_logprobs"]]
            return Answer(
                tokens=tuple(map(int, got["output_ids"])),
                logprobs=tuple(float(row[0]) for row in meta["output_token_logprobs"]),
                top=tuple(tuple((float(row[0]), int(row[1])) for row in entry) for entry in rows),
                drafts=tuple(int(meta[name]) for name in _DRAFTS if name in meta),
            )
        except (*FAILURES, KeyError, TypeError, IndexError) as error:
            raise LoadFailed(f"SGLang gave no tokens ({error}): {self.tail()}") from None

    def tail(self) -> str:
        """The end of its log, as part of a sentence."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "; ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())

    def _flush(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while True:  # refused while the last request is still being finished
            try:
                self.client.ask("POST", "/flush_cache", {}, seconds=ANSWER_SECONDS)
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                with ending.wait():
                    time.sleep(POLL_SECONDS)
            else:
                return
