"""Runs the layouts of tests/gpu/layouts.py on this machine's GPUs, several at a time: ranks [OPTIONS] [LAYOUT...]

Each layout (tests/gpu/story.py) has its own agents, runtime directory and logs, and a limit of its own. A line is
printed as soon as one ends, failures stop nothing, and a table comes last. In the folder of --out: ranks.json with all
results, ranks-logs.tar.gz with all logs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import rig
from tests.gpu.layouts import LAYOUTS, chosen
from tests.gpu.story import DEFAULT, STEPS
from tests.support.engine import end_with_parent

GRACE_SECONDS = 40.0
"""A layout that is interrupted ends its engines and agents, and writes what it knows."""
BOUND = ("receive", "map", "private", "bind")
WIDTH = 600


@dataclass(slots=True)
class Outcome:
    """What became of one layout: ok, wrong (and in what), failed, late, skipped or not run."""

    layout: str
    word: str
    said: str = ""
    seconds: float = 0.0
    done: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """For people."""
        steps = f"({' '.join(self.done)}) " if self.done else ""
        return f"{self.word:8} {self.layout:14} {self.seconds:4.0f} s  {steps}{self.said[-WIDTH:]}"

    def rows(self) -> str:
        """All figures, one a line."""
        return "\n".join([self.line(), *(f"    {name}: {_shown(value)}" for name, value in self.figures.items())])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"default: for these GPUs, of {' '.join(LAYOUTS)}")
    parser.add_argument("--jobs", type=int, default=3, help="layouts at a time (default: 3)")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for one layout (default: 500)")
    parser.add_argument("--total", type=float, default=520.0, help="seconds after which none begins or goes on")
    parser.add_argument("--steps", default=",".join(DEFAULT), help=f"of {','.join(STEPS)} (default: %(default)s)")
    parser.add_argument("--cold", action="store_true", help="loaders read from the disk, not from the page cache")
    parser.add_argument("--unproven", choices=("refuse", "check"), default="refuse", help="policy.unproven of agents")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    parsed = parser.parse_args()
    if unknown := [name for name in parsed.layouts if name not in LAYOUTS]:
        parser.error(f"no such layout: {' '.join(unknown)}")
    if unknown := [step for step in parsed.steps.split(",") if step not in STEPS]:
        parser.error(f"no such step: {' '.join(unknown)}")
    return parsed


def run(layout: str, work: Path, seconds: float, *options: str) -> Outcome:
    """Run one layout in a process of its own, and end all that is left of it; never raises."""
    begin = time.monotonic()
    folder = work / layout
    folder.mkdir(parents=True)
    try:
        outcome = _run(layout, folder, seconds, options)
    except Exception as error:
        outcome = Outcome(layout, "failed", f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - begin
    shutil.rmtree(folder / "models", ignore_errors=True)
    print(outcome.line(), flush=True)
    return outcome


def _run(layout: str, folder: Path, seconds: float, options: Sequence[str]) -> Outcome:
    if seconds <= 0:
        return Outcome(layout, "not run", "no time was left")
    own = max(seconds - GRACE_SECONDS / 2, 1)  # it stops by itself, before it is interrupted
    command = [sys.executable, "-m", "tests.gpu.story", layout, str(folder), "--seconds", f"{own:.0f}", *options]
    with (folder / "story.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=rig.variables(),
            preexec_fn=end_with_parent,  # Ctrl-C reaches it by itself, and then it ends in order
        )
        late = rig.ended_late(process, seconds, GRACE_SECONDS)
    result: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / "result.json").read_text())
    broken, failed = "; ".join(result.get("broken", ())), result.get("failed", "")
    if not (broken or failed) and process.returncode:
        failed = (folder / "story.log").read_text(errors="replace").strip()
    word = "late" if late else "failed" if failed else "wrong" if broken else "ok"
    said = "; ".join(filter(None, (broken, failed)))
    return Outcome(layout, word, said, done=result.get("done", []), figures=result.get("figures", {}))


def _shown(value: Any) -> str:
    """A figure; of an attach's steps, their sum first."""
    if isinstance(value, list) and value and isinstance(value[0], list) and isinstance(value[0][1], dict):
        shown = [f"rank {rank}: {sum(s.get(n, 0) for n in BOUND):.1f} bound, {json.dumps(s)}" for rank, s in value]
        return "; ".join(shown).replace('"', "")
    return str(value)


def save(outcomes: Sequence[Outcome], work: Path, out: Path) -> None:
    """Write all results into one file, and all logs into another one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "ranks.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    with tarfile.open(out / "ranks-logs.tar.gz", "w:gz") as archive:
        archive.add(work, arcname="ranks", filter=lambda entry: entry if entry.isreg() or entry.isdir() else None)


def main() -> int:
    """Run all layouts; 0 when nothing was wrong with any that could run."""
    options = arguments()
    # Where it is ignored (a job in the background), what is started here would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = time.monotonic() + options.total
    layouts = chosen(options.layouts, rig.gpu_count(), rig.profile().backend)
    skipped = [Outcome(name, "skipped", why) for name, why in layouts.items() if why]
    names = [name for name, why in layouts.items() if not why]
    jobs = max(1, min(options.jobs, len(names)))
    passed = ["--steps", options.steps, "--unproven", options.unproven]
    passed += ["--cold"] if options.cold else []
    passed += ["--alone"] if jobs == 1 else []
    work = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))  # a short path: it will hold sockets
    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            outcomes = [
                *pool.map(lambda name: run(name, work, min(options.limit, end - time.monotonic()), *passed), names),
                *skipped,
            ]
        print("\n" + "\n".join(outcome.rows() for outcome in outcomes if outcome.figures))
        print("\n" + "\n".join(outcome.line() for outcome in outcomes), flush=True)
        save(outcomes, work, options.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if all(outcome.word in ("ok", "skipped") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
