"""KV memory that is given back and taken again, for the kinds of tests/models/kinds.py: parked [OPTIONS] [KIND...]

An engine in a slot for each, from disk: it answers, is parked, and woken, and has to answer the same. Prints a line for
each kind as soon as it ends; writes parked.json and logs to --out. WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
STATES = ("--max-mamba-cache-size", "256")
"""Of models that keep them: more than stay while an engine is parked."""
POOL = ("--max-total-tokens", "131072", "--max-running-requests", "4")
LEAST_MIB = 48
"""What parking gives back, at least: two layers of the smallest heads."""
START_SECONDS = 300.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(DEFAULT), metavar="KIND")
    parser.add_argument("--jobs", type=int, default=3, help="engines at a time (default: 3)")
    parser.add_argument("--total", type=float, default=400.0, help="seconds for everything")
    return command_line.parsed(parser)


def prove(kind: str, folder: Path, notes: Notes, out: Path) -> str:
    """What came of one kind, in a line; never raises."""
    try:
        return _prove(kind, folder / kind, notes, out)
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        notes.check(False, f"{kind}: {sentence}")
        return f"failed  {kind}: {sentence[-400:]}"


def _prove(kind: str, folder: Path, notes: Notes, out: Path) -> str:
    (runtime := folder / "run").mkdir(parents=True)
    model, profile = folder / "model", rig.profile()
    subprocess.run([sys.executable, "-m", "tests.models.make_kind", kind, model], capture_output=True, check=True)
    arguments = KINDS[kind].arguments(model)
    states = STATES if STATES[0] in arguments else ()
    described = Described(
        (*profile.fast, *POOL, *arguments, *states),
        engine="on_mismatch = 'fallback'",
        standby="kv_gigabytes = 4.0\nunproven = true",
        model=model,
        base=profile.base,
    )
    slots = Slots(folder, runtime, notes, kind, described, None)
    with slots.kept(out):
        asked = Engine(model, log=folder / "asked", command=["true"], base=())
        asked.port = slots.number
        slots.start("a")
        slots.until("a", "active", START_SECONDS)
        first, before, tokens = rig.answers(asked, PROMPTS), all_answers(asked), rig.pool_tokens(asked)
        took, used = [], [memory(slots)]
        for verb, role in (("park", "parked"), ("wake", "active")):
            begin = time.monotonic()
            slots.ask("a", verb)
            slots.until("a", role, 60)
            took.append(round(time.monotonic() - begin, 2))
            used.append(memory(slots))
        again, after = rig.answers(asked, PROMPTS), all_answers(asked)
        notes.check(rig.pool_tokens(asked) == tokens, f"{kind}: another pool than before")
        if profile.backend == "cuda":
            notes.check(used[0] - used[1] >= LEAST_MIB, f"{kind}: parking gave {used[0] - used[1]} MiB back")
        with contextlib.suppress(IndexError):
            notes.note(f"{kind}: memory", [line for line in slots.said("a") if "GB of KV memory" in line][-1])
    same = again == first and after == before
    # A kernel that does not repeat its own results within one engine says nothing about its memory.
    repeats = before[: len(PROMPTS)] == first
    notes.check(same or not repeats, f"{kind}: other tokens than before it was parked")
    word = "equal" if same else "differs" if repeats else "answers not compared"
    notes.note(kind, {"tokens": word, "pool": tokens, "MiB": used, "park": took[0], "wake": took[1]})
    return f"{word:8}{kind}: pool of {tokens} tokens, {used} MiB, parked in {took[0]} s, woken in {took[1]} s"


def all_answers(asked: Engine) -> list[list[int]]:
    """One after the other, since what is computed together may differ in the last bit."""
    return [*rig.answers(asked, PROMPTS), *rig.answers(asked, LONG)]


def memory(slots: Slots) -> int:
    """MiB of GPU memory that the processes of the engine have."""
    tree = psutil.Process(slots.launchers["a"].pid).children(recursive=True)
    used = rig.process_used()
    return sum(used.get(process.pid, 0) for process in tree) // rig.MIB


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
