"""From an engine's SIGKILL to its successor's first token, by what shortens it: starts [OPTIONS] [WAY...]

One agent holds the model. For each way a launcher in restart mode starts an engine, which is killed several times; its
answers are compared with those of an engine from disk. Prints a table of medians and phases last; writes starts.json
and logs to --out. WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.bench import own_cache
from tests.gpu import hold, rig, throughput
from tests.gpu.notes import Notes
from tests.support.engine import Engine, EngineFailed
from weightcache.launch.arguments import LEVERS

FROM_DISK = "disk"
ALL = "all"
NONE = "none"
OWN = "own"
"""SGLang's own weight cache, restarted by this script: no launcher of ours."""
PARKED = re.compile(r"weightcache: .*parked")
SERVES = re.compile(r"weightcache: serving after")
GRAPHS = re.compile(r"weightcache: captured \d+ prefill graphs in [^\n]*")
FIRST = [5, 17, 99]
GPU_BASE = (
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--mem-fraction-static", "0.7"),
)
"""An engine as operators run it, with all its graphs. The bundle has neither FlashInfer nor a grammar."""


@dataclass(frozen=True, slots=True)
class Way:
    """Which levers may shorten a start, and whether the weights are attached."""

    name: str

    @property
    def levers(self) -> tuple[str, ...]:
        """What is used."""
        if self.name == ALL:
            return LEVERS
        return () if self.name in (FROM_DISK, NONE, OWN) else tuple(self.name.split("+"))

    def options(self, agents: Path, nobody: Path) -> list[str]:
        """The launcher's options."""
        without = [lever for lever in LEVERS if lever not in self.levers]
        options = ["--wcache-restart", "--wcache-runtime-dir", str(nobody if self.name == FROM_DISK else agents)]
        return [*options, "--wcache-without", ",".join(without)] if without else options


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_ = f"{FROM_DISK}, {NONE}, {ALL}, {OWN}, or some of {', '.join(LEVERS)} joined by +"
    parser.add_argument("ways", nargs="*", default=[ALL, NONE], metavar="WAY", help=help_)
    parser.add_argument("--kills", type=int, default=3, help="of the engine, for each way (default: 3)")
    parser.add_argument("--total", type=float, default=560.0, help="seconds for everything")
    help_ = "ways beside each other (default: 1); captures of more than two slow each other down"
    parser.add_argument("--jobs", type=int, default=1, help=help_)
    parser.add_argument("--tokens", type=int, help="limit the KV pool, so that several engines fit on the GPU")
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept by all ways that keep them")
    parser.add_argument("--agents", type=Path, help="the folder of an agent that holds the model (hold.py)")
    parser.add_argument("--load", action="store_true", help="measure the throughput of a fixed load of each way")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds between a start and the load")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    parsed = parser.parse_args()
    for way in parsed.ways:
        if way not in (FROM_DISK, NONE, ALL, OWN) and not set(way.split("+")) <= set(LEVERS):
            parser.error(f"no such way: {way}")
    return parsed


class Killed:
    """One way: a launcher whose engine is killed again and again."""

    def __init__(self, way: Way, engine: Engine, notes: Notes, folder: Path) -> None:
        self.way = way
        self.engine = engine
        self.notes = notes
        self.state = folder / "state"
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        """Of each start after a kill, in seconds."""

    def note(self, name: str, value: Any) -> None:
        """A figure of this way."""
        self.notes.note(f"{self.way.name}: {name}", value)
        print(f"FIGURE {self.way.name}: {name}: {value}", flush=True)

    def run(self, kills: int, load: bool, settle: float) -> tuple[list[list[int]], list[list[int]]]:
        """First start, kills, answers, load. The answers at once, and once all graphs are there."""
        self.note("first start to first token, s", round(self._first_token(), 2))
        self._served(0)
        for number in range(1, kills + 1):
            self._all_graphs(number)
            if "workers" in self.way.levers:
                self._parked(number)
            self._kill()
            seconds = self._first_token()
            self.seconds.append(round(seconds, 2))
            self.note(f"killed {number}: SIGKILL to first token, s", round(seconds, 2))
            self._served(number)
        early = rig.answers(self.engine)
        self._all_graphs(kills + 1)
        late = rig.answers(self.engine)
        if load:
            time.sleep(self.notes.left(settle))
            self._load()
        return early, late

    def _served(self, number: int) -> None:
        """Wait for the end of the warm-up of this start, and note its phases."""
        rig.wait_for(lambda: self._count(SERVES) > number, self.notes.left(60), "the end of the warm-up")
        found = self._phases()
        self.note(f"start {number}: phases, s", found)
        if number and isinstance(found, dict):
            self.phases.append(found)

    def _all_graphs(self, number: int) -> None:
        """Wait until so many engines captured what was put off: killed before, it makes the next one capture first."""
        if "graphs" in self.way.levers and rig.profile().backend == "cuda":
            rig.wait_for(lambda: self._count(GRAPHS) >= number, self.notes.left(120), "the prefill graphs")
            self.note(f"start {number - 1}: prefill graphs", GRAPHS.findall(self.engine.text())[-1])

    def _first_token(self) -> float:
        """Seconds from now to an answer of one token."""
        begin = time.monotonic()
        deadline = begin + self.notes.left(400)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError, EngineFailed):
                self.engine.tokens(FIRST, 1, timeout=60)
                return time.monotonic() - begin
            if self.engine.process.poll() is not None:
                raise AssertionError(f"the launcher ended\n{self.engine.tail(40)}")
            time.sleep(0.02)
        raise AssertionError(f"no token\n{self.engine.tail(40)}")

    def _main(self) -> psutil.Process:
        """The process that listens."""
        for process in psutil.Process(self.engine.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for row in process.net_connections("tcp"):
                    if row.status == psutil.CONN_LISTEN and row.laddr.port == self.engine.port:
                        return process
        raise AssertionError("nobody listens")

    def _kill(self) -> None:
        main = self._main()
        os.kill(main.pid, signal.SIGKILL)
        rig.wait_for(lambda: not main.is_running() or main.status() == psutil.STATUS_ZOMBIE, 10, "the engine's death")

    def _parked(self, number: int) -> None:
        """Wait for the worker of the next start, and look at what it holds."""
        rig.wait_for(lambda: self._count(PARKED) >= number, self.notes.left(200), "a parked worker")
        line = [line for line in self.engine.text().splitlines() if PARKED.search(line)][-1]
        self.note(f"killed {number}: {PARKED.findall(line)[0][:20]}", line)
        main = self._main()
        serving = {main.pid, *(child.pid for child in main.children(recursive=True))}
        others = {child.pid for child in psutil.Process(self.engine.process.pid).children(recursive=True)} - serving
        holders = {pid: used for pid, used in rig.process_used().items() if pid in others}
        self.note(f"killed {number}: GPU memory of the parked processes, bytes", holders)
        self.notes.check(not holders, f"{self.way.name}: parked processes hold GPU memory: {holders}")

    def _count(self, pattern: re.Pattern[str]) -> int:
        return len(pattern.findall(self.engine.text()))

    def _phases(self) -> Any:
        """Of the newest start, as `wcache starts show` tells."""
        argv = [sys.executable, "-m", "weightcache.cli", "starts", "show", "--json"]
        env = rig.variables() | {"WEIGHTCACHE_STATE_DIR": str(self.state)}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=env, check=False)
        try:
            return json.loads(done.stdout)["phases"]
        except (ValueError, KeyError, TypeError):
            return f"not known: {done.stderr[-200:]}"

    def _load(self) -> None:
        log = self.state.parent / "bench.log"
        for name, value in throughput.measure(self.engine.port, log, self.notes.left(200)).items():
            self.note(f"load: {name}", value)


@contextlib.contextmanager
def launched(way: Way, agents: Path, folder: Path, notes: Notes, options: argparse.Namespace) -> Iterator[Killed]:
    """A launcher in restart mode, with folders of its own for state and compiled kernels."""
    folder.mkdir(parents=True)
    (nobody := folder / "nobody").mkdir()
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "weightcache.launch", *way.options(agents, nobody)]
    made = engine(folder / "log", command, options)
    made.environment = rig.variables() | {
        "WEIGHTCACHE_STATE_DIR": str(folder / "state"),
        "WEIGHTCACHE_CACHE_DIR": str(options.cache or folder / "cache"),
        # What earlier runs compiled in the usual temporary directory is not found: this engine's kernels are its own.
        "TMPDIR": str(folder / "tmp"),
    }
    try:
        yield Killed(way, made.start(), notes, folder)
    finally:
        made.stop()


def engine(log: Path, command: list[str], options: argparse.Namespace, *more: str) -> Engine:
    """An engine with the same arguments for all ways."""
    profile = rig.profile()
    base = GPU_BASE if profile.backend == "cuda" else profile.base
    limit = ("--max-total-tokens", str(options.tokens)) if options.tokens else ()
    return Engine(profile.model, log=log, command=command, base=base, arguments=(*limit, *more))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one way: seconds from each SIGKILL to the next first token, phases, and answers, where it got that far."""

    seconds: list[float]
    phases: list[dict[str, float]] = field(default_factory=list)
    early: list[list[int]] | None = None
    late: list[list[int]] | None = None
    failed: str = ""


def run_way(word: str, agents: Path, folder: Path, notes: Notes, options: argparse.Namespace) -> Outcome:
    """All of one way; never raises."""
    log = folder / word / "log"
    killed: Killed | None = None
    try:
        if word == OWN:
            return own(folder / word, notes, options)
        with launched(Way(word), agents, folder / word, notes, options) as killed:
            early, late = killed.run(options.kills, options.load, options.settle)
        return Outcome(killed.seconds, killed.phases, early, late)
    except Exception as error:
        seconds, phases = (killed.seconds, killed.phases) if killed else ([], [])
        return Outcome(seconds, phases, failed=f"{word}: {type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError):
            (options.out / f"starts-{word.replace('+', '-')}.log").write_bytes(log.read_bytes())
        notes.finish(word)


def own(folder: Path, notes: Notes, options: argparse.Namespace) -> Outcome:
    """SGLang's daemon holds the weights; each start follows a SIGKILL of the one before at once."""
    folder.mkdir()
    seconds: list[float] = []
    command = [sys.executable, "-m", "sglang.launch_server"]
    with own_cache.daemon(options.out / "starts-own-daemon.log"):
        for number in range(options.kills + 1):
            made = engine(folder / "log", command, options, "--weight-cache-mode", "client")
            made.environment = rig.variables()
            begin = time.monotonic()
            try:
                made.start().wait_ready(notes.left(300))
                made.tokens(FIRST, 1)
                took = round(time.monotonic() - begin, 2)
                notes.note(f"{OWN}: start {number} to first token, s", took)
                seconds += [took] if number else []
                made.process.kill()
            finally:
                made.stop()
    return Outcome(seconds)


def medians(phases: list[dict[str, float]]) -> dict[str, float]:
    """Of each phase, where a start that did not have it counts as none of it."""
    names = dict.fromkeys(name for one in phases for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in phases) for name in names}


def compare(outcomes: dict[str, Outcome], notes: Notes) -> None:
    """All answers are those of the engine from disk, or else of the first one."""
    answered = {word: outcome for word, outcome in outcomes.items() if outcome.late is not None}
    if not answered:
        return
    first = FROM_DISK if FROM_DISK in answered else next(iter(answered))
    expected = answered[first].late
    for word, outcome in answered.items():
        notes.check(outcome.late == expected, f"{word}: other tokens than {first}")
        notes.note(f"{word}: equal to the tokens of {first} before all graphs were there", outcome.early == expected)


def main() -> int:
    """Run all ways that were asked for."""
    options = arguments()
    notes = Notes(options.out / "starts.json", options.total)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="wc-starts-", dir="/tmp") as name:
        folder = Path(name)
        try:
            with (
                hold.agent(options.agents, folder / "agent") as agents,
                concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
            ):
                tasks = {word: pool.submit(run_way, word, agents, folder, notes, options) for word in options.ways}
                outcomes = {word: task.result() for word, task in tasks.items()}
        except (AssertionError, TimeoutError, subprocess.SubprocessError) as error:
            notes.failed = f"{type(error).__name__}: {error}"
    compare(outcomes, notes)
    notes.broken += [outcome.failed for outcome in outcomes.values() if outcome.failed]
    notes.write()
    print("\nSIGKILL to first token, s (median of each way, and of the phases of its starts after a kill)")
    for word, outcome in outcomes.items():
        if seconds := outcome.seconds:
            phases = ", ".join(f"{name} {value:.2f}" for name, value in medians(outcome.phases).items())
            print(f"  {word:32} {statistics.median(seconds):6.2f}  {seconds}  {phases}")
        else:
            print(f"  {word:32} -")
    return notes.say()


if __name__ == "__main__":
    sys.exit(main())
