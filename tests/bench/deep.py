"""Load and attach of 3,004 tensors with a real SGLang, step by step: ``python -m tests.bench.deep [ROUNDS]``.

The checkpoint is the kind ``deep`` of tests/models/kinds.py: what takes time is the number of tensors and of layers. An
agent loads it, then ROUNDS engines attach (default 3), each of them ended when it has decided, since 375 layers answer
slowly on a CPU. On a GPU machine, ``tests/gpu/run.sh parity deep`` prints the same steps and compares the answers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests import models
from tests.bench import __main__ as bench
from tests.gpu import rig
from tests.gpu.rig import Agent, Figures
from weightcache import manifest, protocol, transport
from weightcache.client import Conversation
from weightcache.memory import MAX_ARENAS, memfd

START_SECONDS = 400.0
TIMES = 20


def loaded(agent: Agent, figures: Figures) -> None:
    """How long SGLang's load took, and what publishing added."""
    begin = time.monotonic()
    rig.wcache(agent, "load", "--wait", "400")
    figures.note("load to ready, s", round(time.monotonic() - begin, 2))
    held = agent.status()["sets"][0]
    figures.note("of which SGLang's own load, s", held["load_seconds"])
    figures.note("tensors", held["tensors"])
    steps = re.search(r"published set \S+: (\{[^}]*\})", agent.log.read_text(errors="replace"))
    figures.note("publish: steps, ms", steps[1] if steps else "")


def coded(agent: Agent, figures: Figures) -> None:
    """The manifest's size, and how long it takes to write and to read it: the best of TIMES."""
    with Conversation(agent.directory / "0.status.sock") as conversation:
        conversation.send(protocol.Inspect(None))
        _, fds = conversation.receive(30.0, 1 + MAX_ARENAS)
    data = memfd.read_sealed(fds[0], manifest.MAX_BYTES)
    transport.close_all(fds)
    body = manifest.decode(data)
    figures.note("manifest: bytes", len(data))
    figures.note(
        "manifest: encode / decode, ms", [_best(lambda: manifest.encode(body)), _best(lambda: manifest.decode(data))]
    )


def _best(run: Callable[[], object]) -> float:
    spent = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begin)
    return round(min(spent) * 1000, 2)


def attached(folder: Path, number: int, figures: Figures) -> None:
    """One engine, as far as its decision."""
    made = rig.engine(folder / f"attached-{number}.log", directory=folder, extra=["--skip-server-warmup"])
    made.start()
    try:
        rig.wait_for(lambda: rig.milliseconds(made), START_SECONDS, "the engine's decision")
        steps = rig.milliseconds(made)
        short = sum(steps[name] for name in ("receive", "map", "private", "bind"))
        figures.note(f"attach {number}: receive + map + private copies + bind, ms", round(short, 1))
        figures.note(f"attach {number}: steps, ms", json.dumps(steps))
    finally:
        made.stop()


def main(rounds: int) -> None:
    """Load once, attach several times."""
    os.environ["WEIGHTCACHE_MODEL"] = str(models.kind("deep"))
    bench.choose_machine()
    figures = Figures()
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    agent = Agent(folder, model=True).start()
    try:
        loaded(agent, figures)
        coded(agent, figures)
        for number in range(1, rounds + 1):
            attached(folder, number, figures)
    finally:
        agent.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
