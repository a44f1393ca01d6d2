"""Two engines that share a port on one GPU, and the active one killed under load: standby [OPTIONS]

One agent holds the model; two launchers have the slots of one engine and are started together, as after a boot. The
engine is handed over, parked and woken; then clients open a connection for each request, and the active engine's main
process is killed again and again, each time after a new standby stands; last, the throughput of the active engine with
the standby and alone. Prints time lines, memory and errors; writes standby.json and logs to --out.
WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
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

from tests.gpu import hold, rig, throughput
from tests.gpu.notes import Notes
from tests.gpu.slots import CLIENTS, OTHER, Clients, Described, Slots
from tests.support.engine import Engine

NAME = "gpu"
LOAD_SECONDS = 40.0
"""For one fixed load, at most: kept back from the kills."""
ROUND_SECONDS = 75.0
"""For a kill and the start of the next standby, about: no kill begins without them."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="as many as the time allows, at most (default: 10)")
    parser.add_argument("--total", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--reserve", type=float, default=8.0, help="GiB that the active engine leaves to the standby")
    parser.add_argument("--sglang", type=shlex.split, default=[], help='more arguments of SGLang: --sglang="..."')
    parser.add_argument("--without", nargs="*", default=[], help="levers that are not used")
    parser.add_argument("--cache", type=Path, help="where compiled kernels are kept")
    parser.add_argument("--agents", type=Path, help="the folder of an agent that holds the model (hold.py)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    return parser.parse_args()


class Story:
    """What is done to the slots, step by step."""

    def __init__(self, slots: Slots, notes: Notes, options: argparse.Namespace) -> None:
        self.slots, self.notes, self.options = slots, notes, options
        self.asked = Engine(rig.profile().model, log=slots.folder / "asked", command=["true"], base=())
        self.asked.port = slots.number
        self.active = "a"
        self.kills = 0

    def note(self, name: str, value: Any) -> None:
        self.notes.note(name, value)
        print(f"FIGURE {name}: {value}", flush=True)

    def run(self) -> None:
        """Everything."""
        idle = rig.device_used()
        begin = time.monotonic()
        for slot in "ab":
            self.slots.start(slot)
        self.slots.wait(lambda: "active" in self._roles(), 400, "an active engine")
        self.note("start of both engines: one is active after, s", round(time.monotonic() - begin, 2))
        self.slots.wait(lambda: self._roles() == ["active", "standby"], 400, "a standby")
        self.note("start of both engines: the other one stands by after, s", round(time.monotonic() - begin, 2))
        self.active = "a" if self.slots.role("a") == "active" else "b"
        expected = rig.answers(self.asked)
        self.note("KV pool, tokens", rig.pool_tokens(self.asked))
        self.note("GPU memory of both engines, MiB", (rig.device_used() - idle) // rig.MIB)
        self.note("GPU memory by process, MiB", {pid: used // rig.MIB for pid, used in rig.process_used().items()})
        self.notes.finish("stand")
        with Clients(self.slots.number).asking() as clients:
            self._hand_over(clients)
            self._park(clients)
            left = self.notes.left(self.options.total)
            for number in range(1, self.options.kills + 1):
                if left < ROUND_SECONDS + 2 * LOAD_SECONDS:
                    print(f"no time for kill {number}: {left:.0f} s are left", flush=True)
                    break
                self._kill(number, clients)
                left = self.notes.left(self.options.total)
            self.notes.finish("kills")
        self._errors(clients)
        self.slots.until(OTHER[self.active], "standby", 400)
        self.notes.check(rig.answers(self.asked) == expected, "other tokens after all that")
        self.note("KV pool, tokens, afterwards", rig.pool_tokens(self.asked))
        self._load("beside a standby")
        before = rig.device_used()
        self.slots.stop(OTHER[self.active])
        time.sleep(3)  # its ranks may be a moment longer than its launcher
        self.note("GPU memory of the standby, MiB", (before - rig.device_used()) // rig.MIB)
        self._load("alone")
        self.notes.finish("all")

    def _roles(self) -> list[str]:
        return sorted(map(self.slots.role, "ab"))

    def _kill(self, number: int, clients: Clients) -> None:
        other = OTHER[self.active]
        found = self.slots.until(self.active, "active", 60)
        self.slots.until(other, "standby", 400)
        assert found.main is not None
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(found.main.pid, signal.SIGKILL)
        self.slots.wait(lambda: clients.first_after(killed), 60, "an answer")
        answered = clients.first_after(killed)
        assert answered is not None
        seconds = round(answered - killed, 3)
        self.notes.figures.setdefault("seconds", []).append(seconds)
        promoted = self.slots.until(other, "active", 60).promotions[-1]
        self.note(f"kill {number}: SIGKILL to first token, s", seconds)
        self.note(f"kill {number}: promotion", {"seconds": promoted.seconds, "phases": promoted.phases})
        self.active = other
        self.kills = number
        again = time.monotonic()
        self.slots.until(OTHER[other], "standby", 400)
        self.note(f"kill {number}: a new standby after, s", round(time.monotonic() - again, 1))

    def _hand_over(self, clients: Clients) -> None:
        other = OTHER[self.active]
        self.slots.until(other, "standby", 400)
        time.sleep(1)
        begin = time.monotonic()
        self.slots.ask(self.active, "retire")
        self.slots.until(other, "active", 60)
        self.note("promote: to active, s", round(time.monotonic() - begin, 3))
        self.slots.wait(lambda: clients.first_after(begin), 60, "an answer")
        answered = clients.first_after(begin)
        assert answered is not None
        self.note("promote: to the answer of a request sent afterwards, s", round(answered - begin, 3))
        self.slots.until(self.active, "standby", 60)
        self.active = other
        self.notes.finish("promote")

    def _park(self, clients: Clients) -> None:
        before = rig.device_used()
        begin = time.monotonic()
        for slot in "ab":
            self.slots.ask(slot, "park")
        self.slots.until(self.active, "parked", 60)
        self.note("park: to parked, s", round(time.monotonic() - begin, 3))
        self.note("GPU memory that parking gives back, MiB", (before - rig.device_used()) // rig.MIB)
        woken = time.monotonic()
        for slot in "ab":
            self.slots.ask(slot, "wake")
        self.slots.wait(lambda: "active" in self._roles(), 60, "an active engine")
        self.note("wake: to active, s", round(time.monotonic() - woken, 3))
        self.slots.wait(lambda: clients.first_after(woken), 60, "an answer")
        answered = clients.first_after(woken)
        assert answered is not None
        self.note("wake: to the answer of a request sent afterwards, s", round(answered - woken, 3))
        self.active = "a" if self.slots.role("a") == "active" else "b"
        self.notes.finish("park")

    def _load(self, how: str) -> None:
        log = self.slots.folder / "bench.log"
        for number in (1, 2):
            for name, value in throughput.measure(self.slots.number, log, LOAD_SECONDS).items():
                self.note(f"load {number} {how}: {name}", value)

    def _errors(self, clients: Clients) -> None:
        wrong = clients.wrong()
        self.note("requests, and what went wrong", {"all": len(clients.answers), **wrong})
        self.notes.check("ConnectionRefusedError" not in wrong, "a connection was refused")
        most = CLIENTS * self.kills
        self.notes.check(sum(wrong.values()) <= most, f"more than {most} requests failed: {wrong}")


def main() -> int:
    """Run it."""
    options = arguments()
    notes = Notes(options.out / "standby.json", options.total)
    with tempfile.TemporaryDirectory(prefix="wc-standby-", dir="/tmp") as name:
        folder = Path(name)
        described = Described(
            tuple(options.sglang), tuple(options.without), standby=f"reserve_gigabytes = {options.reserve}"
        )
        try:
            with hold.agent(options.agents, folder / "agent") as agents:
                slots = Slots(folder, agents, notes, NAME, described, options.cache)
                with slots.kept(options.out):
                    Story(slots, notes, options).run()
        except (AssertionError, TimeoutError, subprocess.SubprocessError, OSError) as error:
            notes.failed = f"{type(error).__name__}: {error}"
        notes.write()
    if seconds := notes.figures.get("seconds"):
        print(f"\nSIGKILL to first token, s: median {statistics.median(seconds):.3f}, worst {max(seconds):.3f}")
    return notes.say()


if __name__ == "__main__":
    sys.exit(main())
