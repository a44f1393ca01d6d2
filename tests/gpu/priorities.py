"""Two engines of different priority on one GPU, whose KV memory does not fit beside each other: priorities [OPTIONS]

One agent holds the model for both; each engine has one slot. Clients ask both all the time. The more important engine
is parked and woken, then killed, then it comes back: each time the other one has to answer, or to wait. Prints how long
each change took; writes priorities.json and logs to --out. WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu import hold, rig
from tests.gpu.notes import Notes
from tests.gpu.slots import CLIENTS, Clients, Described, Slots

MORE, LESS = "chat", "batch"
IMPORTANCE = {MORE: 10, LESS: 0}
TO_MORE = "the more important one is woken: to its first token, s"
TO_LESS = "the more important one is parked: to the other one's first token, s"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of parking and waking (default: 3)")
    parser.add_argument("--total", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--kv", type=float, default=70.0, help="GiB of KV memory of each engine (default: 70)")
    parser.add_argument("--sglang", type=shlex.split, default=[], help='more arguments of SGLang: --sglang="..."')
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept")
    parser.add_argument("--agents", type=Path, help="the folder of an agent that holds the model (hold.py)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    return parser.parse_args()


class Story:
    """What is done to both engines, step by step."""

    def __init__(self, more: Slots, less: Slots, notes: Notes, rounds: int) -> None:
        self.more, self.less, self.notes, self.rounds = more, less, notes, rounds
        self.taken: dict[str, list[float]] = {}
        self.kills = 0

    def note(self, name: str, value: Any) -> None:
        self.notes.note(name, value)
        print(f"FIGURE {name}: {value}", flush=True)

    def run(self) -> None:
        """Everything."""
        for slots in (self.more, self.less):
            slots.start("a")
        self.more.until("a", "active", 400)
        self.less.until("a", "parked", 400)
        used = rig.device_used()
        self.note("GPU memory in use, one active and one parked, MiB", used // rig.MIB)
        with Clients(self.more.number).asking() as asking, Clients(self.less.number).asking() as waiting:
            for _ in range(self.rounds):
                begin = time.monotonic()
                self.more.ask("a", "park")
                self._answered(TO_LESS, waiting, self.less, begin)
                self.more.until("a", "parked", 60)
                time.sleep(2)
                begin = time.monotonic()
                self.more.ask("a", "wake")
                self._answered(TO_MORE, asking, self.more, begin)
                self.note("its phases, s", self._phases(self.more))
                self.less.until("a", "parked", 60)
                time.sleep(1)
            self.notes.finish("rounds")
            self._kill(asking, waiting)
        self.kills += 1
        for name, clients in ((MORE, asking), (LESS, waiting)):
            wrong = clients.wrong()
            self.note(f"{name}: requests, and what went wrong", {"all": len(clients.answers), **wrong})
            self.notes.check("ConnectionRefusedError" not in wrong, f"{name}: a connection was refused")
            most = CLIENTS if name == MORE else 0
            self.notes.check(sum(wrong.values()) <= most, f"{name}: more than {most} requests failed: {wrong}")
        self.notes.finish("all")

    def _answered(self, what: str, clients: Clients, slots: Slots, begin: float) -> None:
        """Note how long it took until a request was answered that was sent, or waited, after ``begin``."""
        slots.wait(lambda: clients.answered_after(begin), 60, "an answer")
        answered = clients.answered_after(begin)
        assert answered is not None
        self.taken.setdefault(what, []).append(round(answered - begin, 3))
        self.note(what, self.taken[what])

    def _phases(self, slots: Slots) -> dict[str, float]:
        found = slots.until("a", "active", 60).promotions[-1]
        return {"all": found.seconds, **found.phases}

    def _kill(self, asking: Clients, waiting: Clients) -> None:
        """The more important engine dies: the other one takes over, and goes again when it is back."""
        found = self.more.until("a", "active", 60)
        assert found.main is not None
        begin = time.monotonic()
        os.kill(found.main.pid, signal.SIGKILL)
        self._answered("the more important one is killed: to the other one's first token, s", waiting, self.less, begin)
        self.more.until("a", "active", 400)
        self.note("it is back after, s", round(time.monotonic() - begin, 1))
        self.note("its phases then, s", self._phases(self.more))
        self.more.wait(lambda: asking.answered_after(time.monotonic() - 1), 60, "an answer")
        self.less.until("a", "parked", 60)
        self.notes.finish("kill")


def main() -> int:
    """Run it."""
    options = arguments()
    notes = Notes(options.out / "priorities.json", options.total)
    with tempfile.TemporaryDirectory(prefix="wc-prior-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        try:
            agents = stack.enter_context(hold.agent(options.agents, folder / "agent"))
            made = [
                stack.enter_context(
                    Slots(folder, agents, notes, name, described(importance, options), options.cache).kept(options.out)
                )
                for name, importance in IMPORTANCE.items()
            ]
            story = Story(made[0], made[1], notes, options.rounds)
            story.run()
            for what, seconds in story.taken.items():
                print(f"{what}: median {statistics.median(seconds):.3f}, worst {max(seconds):.3f}")
        except (AssertionError, TimeoutError, subprocess.SubprocessError, OSError) as error:
            notes.failed = f"{type(error).__name__}: {error}"
        notes.write()
    return notes.say()


def described(importance: int, options: argparse.Namespace) -> Described:
    """An engine's file."""
    standby = f"kv_gigabytes = {options.kv}\ndrain_seconds = 5.0"
    return Described(tuple(options.sglang), engine=f"priority = {importance}", standby=standby)


if __name__ == "__main__":
    sys.exit(main())
