"""KV memory that is given back and taken again, for the kinds of tests/models/kinds.py: parked [OPTIONS] [KIND...]

For each kind an engine in a slot, from disk: it answers, is parked, woken, and has to answer the same, having forgotten
what it computed before; then a second engine stands by beside it, the first one is killed, and the second one has to
answer the same. Prints a line for each kind as soon as it ends; writes parked.json and logs to --out.
WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.gpu import command_line, rig
from tests.gpu.notes import Notes
from tests.gpu.slots import Described, Slots
from tests.models.kinds import KINDS
from tests.support.engine import Engine

DEFAULT = (
    *("dense", "moe", "vision", "lora", "fp8-kv", "mxfp4"),
    *("mla", "fp8-block-mla", "gated-delta", "mamba", "eagle", "standalone"),
)
PROMPTS = ([5, 17, 99, 123, 7], [42, 11, 30, 8], [100, 200, 210, 40, 50, 60])
LONG = [[5 + (11 * place + 17 * number) % 200 for place in range(1500)] for number in range(20)]
"""Each begins in its own way, so that together they use many times what is kept while the engine is parked."""
ALL = (*PROMPTS, *LONG)
STATES = ("--max-mamba-cache-size", "256")
"""Of models that keep them: more than stay while an engine is parked."""
POOL = ("--max-total-tokens", "131072", "--max-running-requests", "4")
WITH_GRAPHS = ("mla", "gated-delta", "mxfp4", "fp8-kv")
"""Prefill graphs as well, which take a while."""
CROWD = 3
"""Requests at the same time."""
GIVEN_BACK = re.compile(r"weightcache: ([\d.]+) GB of KV memory were given back, ([\d.]+) GB stay")
UNLIKE_MIB = 64
"""By which a process may have another amount of memory when it was parked and woken."""
START_SECONDS = 300.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(DEFAULT), metavar="KIND")
    parser.add_argument("--jobs", type=int, default=3, help="engines at a time (default: 3)")
    parser.add_argument("--total", type=float, default=400.0, help="seconds for everything")
    return command_line.parsed(parser)


Answer = tuple[list[int], int]
"""Its tokens, and how often a draft's guesses were verified for them: more often if the draft remembers wrongly."""


class Proof:
    """One kind."""

    def __init__(self, kind: str, folder: Path, notes: Notes) -> None:
        (runtime := folder / "run").mkdir(parents=True)
        self.kind, self.notes, self.cuda = kind, notes, rig.profile().backend == "cuda"
        model = folder / "model"
        subprocess.run([sys.executable, "-m", "tests.models.make_kind", kind, model], capture_output=True, check=True)
        described = Described(
            arguments_of(kind, model),
            engine="on_mismatch = 'fallback'",
            standby="kv_gigabytes = 4.0\nunproven = true",
            model=model,
            base=rig.profile().base,
        )
        self.slots = Slots(folder, runtime, notes, kind, described, None)
        self.asked = Engine(model, log=folder / "asked", command=["true"], base=())
        self.asked.port = self.slots.number

    def run(self) -> str:
        """What came of it, in a line. Raises AssertionError."""
        self.slots.start("a")
        self.slots.until("a", "active", START_SECONDS)
        before, tokens = self._answers(), rig.pool_tokens(self.asked)
        # A kernel that does not repeat its own results within one engine says nothing about its memory.
        repeats = self._answers() == before
        if self.kind == "standalone":  # its draft is the target itself
            self._check(before[0][1] < rig.TOKENS, "no guess of the draft was right")
        seconds = self._park_and_wake()
        after = [self._answers()]
        self._check(rig.pool_tokens(self.asked) == tokens, "another pool than before")
        with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
            list(pool.map(self._ask, LONG[:CROWD]))
        seconds["take-over"] = self._take_over()
        after.append(self._answers())
        same = [answers == before for answers in after]
        self._check(all(same) or not repeats, f"the same tokens after it was woken, after a take-over: {same}")
        word = "equal" if all(same) else "differs" if repeats else "answers not compared"
        self.notes.note(self.kind, {"tokens": word, "pool": tokens, "seconds": seconds})
        return f"{word:8}{self.kind}: pool of {tokens} tokens, seconds: {seconds}"

    def _park_and_wake(self) -> dict[str, float]:
        slots, took, used = self.slots, dict[str, float](), [self._memory()]
        known = self._cached(LONG[-1])
        for verb, role in (("park", "parked"), ("wake", "active")):
            begin = time.monotonic()
            slots.ask("a", verb)
            slots.until("a", role, 60)
            took[verb] = round(time.monotonic() - begin, 2)
            used.append(self._memory())
        cached = self._cached(LONG[-1])
        self._check(cached == 0, f"{cached} tokens (of {known} before) were not forgotten")
        if self.cuda:
            given, kept = GIVEN_BACK.findall("\n".join(slots.said("a")))[-1]
            self.notes.note(f"{self.kind}: GB given back, kept; MiB before, parked, woken", [given, kept, *used])
            self._check(float(given) > float(kept), f"{given} GB were given back, and {kept} GB kept")
            back = (used[0] - used[1]) * rig.MIB
            self._check(back > 0.9e9 * float(given), f"the driver has {back} bytes more, of {given} GB")
            self._check(abs(used[2] - used[0]) <= UNLIKE_MIB, f"MiB before, parked, woken: {used}")
        return took

    def _take_over(self) -> float:
        """Seconds from the death of one engine to the other one's role."""
        self.slots.start("b")
        self.slots.until("b", "standby", START_SECONDS)
        active = self.slots.status("a")
        assert active is not None
        assert active.main is not None
        os.kill(active.main.pid, signal.SIGKILL)
        begin = time.monotonic()
        self.slots.until("b", "active", 60)
        return round(time.monotonic() - begin, 2)

    def _answers(self) -> list[Answer]:
        """One after the other, since what is computed together may differ in the last bit, and each from nothing."""
        rig.answers(self.asked, ())
        return [(found["output_ids"], found["meta_info"].get("spec_verify_ct", 0)) for found in map(self._ask, ALL)]

    def _cached(self, prompt: Sequence[int]) -> int:
        return int(self._ask(prompt)["meta_info"]["cached_tokens"])

    def _ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": rig.TOKENS, "ignore_eos": True}
        status, answer = self.asked.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        assert status == 200, f"{status}: {answer}"
        return dict(answer)

    def _memory(self) -> int:
        """MiB of GPU memory that the processes of the engine have."""
        tree = psutil.Process(self.slots.launchers["a"].pid).children(recursive=True)
        used = rig.process_used()
        return sum(used.get(process.pid, 0) for process in tree) // rig.MIB

    def _check(self, holds: bool, what: str) -> None:
        self.notes.check(holds, f"{self.kind}: {what}")


def arguments_of(kind: str, model: Path) -> tuple[str, ...]:
    """SGLang's."""
    own = tuple(KINDS[kind].arguments(model))
    states = STATES if STATES[0] in own else ()
    fast = () if kind in WITH_GRAPHS else rig.profile().fast
    draft = ("--speculative-draft-model-path", str(model)) if kind == "standalone" else ()
    return (*fast, *POOL, *own, *states, *draft)


def prove(kind: str, folder: Path, notes: Notes, out: Path) -> str:
    """What came of one kind, in a line; never raises."""
    try:
        proof = Proof(kind, folder / kind, notes)
        with proof.slots.kept(out):
            return proof.run()
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        notes.check(False, f"{kind}: {sentence}")
        return f"failed  {kind}: {sentence[-400:]}"


def main() -> int:
    """Prove all kinds."""
    options = arguments()
    notes = Notes(options.out / "parked.json", options.total)
    with tempfile.TemporaryDirectory(prefix="wc-parked-", dir="/tmp") as name:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            tasks = [pool.submit(prove, kind, Path(name), notes, options.out) for kind in options.kinds]
            for task in concurrent.futures.as_completed(tasks):
                print(task.result(), flush=True)
        notes.write()
    return notes.say()


if __name__ == "__main__":
    sys.exit(main())
