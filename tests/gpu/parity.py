"""Compares disk load and attach for the kinds of tests/models/kinds.py, several at a time: parity [OPTIONS] [KIND...]

Makes each checkpoint, runs ``wcache parity`` on it with a limit of its own, prints a line as soon as it ends, and goes
on after failures. In the folder of --out: parity.json with all results, parity-logs.tar.gz with all logs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import re
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

from tests.gpu import command_line, rig
from tests.models.kinds import KINDS

SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "4")
"""Several engines at once: none may take the memory that another one has just measured as free."""
SHOWN = 3
WIDTH = 400
"""Characters of a reason on a line; its end says most, and the file has all."""
GRACE_SECONDS = 30.0
_STEPS = {
    "publish": ("agent.log", re.compile(r"published set \S+: (\{[^}]*\})")),
    "attach": ("attached/log", re.compile(r"outcome='attached'.*?milliseconds=(\{[^}]*\})")),
}


@dataclass(slots=True)
class Outcome:
    """What became of one kind. ``result``: what ``wcache parity --json`` printed, empty when it did not get there.

    ``milliseconds``: those of the steps by which the target was published and attached, as the logs have them.
    """

    kind: str
    word: str
    said: str
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def line(self) -> str:
        """For people."""
        return f"{self.word:8} {self.kind:16} {self.seconds:4.0f} s  {self.said[-WIDTH:]}{self.attached()}"

    def attached(self) -> str:
        """How long the attach took, split by step, in words; empty when it is not known."""
        steps = self.milliseconds.get("attach")
        if not steps:
            return ""
        short = sum(steps.get(name, 0.0) for name in ("receive", "map", "private", "bind"))
        rows = ", ".join(f"{name} {value:.1f}" for name, value in steps.items())
        return f"; receive + map + private copies + bind {short:.1f} ms of {rows}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"default: all of {' '.join(KINDS)}")
    parser.add_argument("--jobs", type=int, default=4, help="comparisons at a time (default: 4)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one comparison (default: 300)")
    parser.add_argument("--total", type=float, default=570.0, help="seconds after which none begins or goes on")
    return command_line.parsed(parser)


def compare(kind: str, work: Path, seconds: float) -> Outcome:
    """Make the checkpoint of ``kind`` and compare; never raises."""
    begin = time.monotonic()
    try:
        outcome = _compare(kind, work, seconds)
    except Exception as error:
        outcome = Outcome(kind, "failed", f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - begin
    outcome.milliseconds = steps(work / kind)
    print(outcome.line(), flush=True)
    return outcome


def _compare(kind: str, work: Path, seconds: float) -> Outcome:
    if seconds <= 0:
        return Outcome(kind, "not run", "no time was left")
    profile = rig.profile()
    model, log = work / "models" / kind, work / f"{kind}.log"
    made = subprocess.run(
        [sys.executable, "-m", "tests.models.make_kind", kind, model], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return Outcome(kind, "failed", f"no checkpoint: {_end(made.stderr)}")
    command = [sys.executable, "-m", "weightcache.loader", "parity", "--json", "--keep", work / kind, "--"]
    options = [*profile.base, *profile.fast, *SMALL, *KINDS[kind].arguments(model)]
    with log.open("w") as err, log.with_suffix(".out").open("w+") as out:
        process = subprocess.Popen(
            [*command, "--model-path", model, *options],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=rig.variables(), start_new_session=True,
        )  # fmt: skip
        late = rig.ended_late(process, seconds, GRACE_SECONDS)
        out.seek(0)
        printed = out.read()
    shutil.rmtree(model, ignore_errors=True)
    result = _decoded(printed)
    if not result:
        said = _end(log.read_text())
        word = "late" if late else "refused" if "SGLang ended with" in said else "failed"
        return Outcome(kind, word, said)
    if result["broken"]:
        first = "; ".join(
            f"{d['path']}: {d['what']}: {d['disk']:.80} | {d['attached']:.80}" for d in result["deviations"][:SHOWN]
        )
        return Outcome(kind, "differs", f"{result['broken']}  {first}", result=result)
    same = "" if result["deterministic"] else ", answers not compared"
    size = f"{result['tensors']} tensors, {result['bytes'] / 1e6:.0f} MB, {result['tokens']} tokens{same}"
    return Outcome(kind, "equal", size, result=result)


def steps(kept: Path) -> dict[str, dict[str, float]]:
    """The milliseconds of each step in the logs of a comparison, as far as it got."""
    found = {}
    for name, (log, pattern) in _STEPS.items():
        with contextlib.suppress(OSError):
            if match := pattern.search((kept / log).read_text(errors="replace")):
                found[name] = dict(json.loads(match[1].replace("'", '"')))
    return found


def _decoded(printed: str) -> dict[str, Any]:
    try:
        return dict(json.loads(printed))
    except ValueError:
        return {}


def _end(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-SHOWN:])[-1500:]


def save(outcomes: Sequence[Outcome], work: Path, out: Path) -> None:
    """Write all results into one file, and all logs into another one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "parity.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    with tarfile.open(out / "parity-logs.tar.gz", "w:gz") as archive:
        archive.add(work, arcname="parity", filter=lambda entry: entry if entry.isreg() or entry.isdir() else None)


def main() -> int:
    """Compare all kinds; 0 when all are equal."""
    options = arguments()
    # Where it is ignored (a job in the background), what is started here would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = time.monotonic() + options.total
    work = Path(tempfile.mkdtemp(prefix="wc-parity-"))
    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(
                pool.map(
                    lambda kind: compare(kind, work, min(options.limit, end - time.monotonic())),
                    options.kinds or KINDS,
                )
            )
        print("\n" + "\n".join(outcome.line() for outcome in outcomes), flush=True)
        save(outcomes, work, options.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if all(outcome.word == "equal" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
