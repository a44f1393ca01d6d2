"""Two engines that share a port on one GPU, and the active one killed under load: standby [OPTIONS]

One agent holds the model; two launchers have the slots of one engine. Clients open a connection for each request. The
active engine's main process is killed again and again, each time after a new standby stands; then the engine is handed
over, parked and woken. Prints time lines, memory and errors; writes standby.json and logs to --out.
WEIGHTCACHE_RIG=host is a dry run on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import rig
from tests.gpu.notes import Notes
from tests.gpu.starts import FIRST, GPU_BASE
from tests.support.engine import Engine, end_with_parent
from weightcache.standby import control, status
from weightcache.standby.places import EnginePaths

NAME = "gpu"
OTHER = {"a": "b", "b": "a"}
CLIENTS = 4
PAUSE_SECONDS = 0.02
REQUEST_SECONDS = 60.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--total", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--reserve", type=float, default=8.0, help="GiB that the active engine leaves to the standby")
    parser.add_argument("--sglang", type=shlex.split, default=[], help='more arguments of SGLang: --sglang="..."')
    parser.add_argument("--without", nargs="*", default=[], help="levers that are not used")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("LOGS", ".")))
    return parser.parse_args()


@dataclass(slots=True)
class Answered:
    """One request: when it was sent and answered (time.monotonic()), and what went wrong."""

    sent: float
    done: float
    wrong: str = ""


@dataclass(slots=True)
class Clients:
    """They ask for one token each, over a new connection each time, until they are told to stop."""

    port: int
    answers: list[Answered] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def asking(self) -> Iterator[Clients]:
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(REQUEST_SECONDS + 5)

    def _run(self) -> None:
        body = json.dumps({"input_ids": FIRST, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        while not self._stop.wait(PAUSE_SECONDS):
            sent, wrong = time.monotonic(), ""
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
            try:
                connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                wrong = "" if answer.status == 200 else f"status {answer.status}"
            except (OSError, http.client.HTTPException) as error:
                wrong = type(error).__name__
            finally:
                connection.close()
            self.answers.append(Answered(sent, time.monotonic(), wrong))

    def first_after(self, moment: float) -> float | None:
        """When the first request that was sent after ``moment`` was answered well."""
        return min((a.done for a in list(self.answers) if a.sent >= moment and not a.wrong), default=None)


class Slots:
    """Both slots of one engine, over an agent that holds the model."""

    def __init__(self, folder: Path, agents: Path, notes: Notes, options: argparse.Namespace) -> None:
        self.folder, self.agents, self.notes = folder, agents, notes
        self.port = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.number = self.port.getsockname()[1]
        self.paths = EnginePaths(agents / "engines", NAME)
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        profile = rig.profile()
        base = GPU_BASE if profile.backend == "cuda" else profile.base
        given = ["--model-path", str(profile.model), *base, *options.sglang, "--port", str(self.number)]
        (folder / "engines").mkdir()
        engine = f"[engine]\narguments = {json.dumps(given)}\nwithout = {json.dumps(options.without)}\n"
        text = f"{engine}[standby]\nreserve_gigabytes = {options.reserve}\n"
        (folder / "engines" / f"{NAME}.toml").write_text(text)

    def start(self, slot: str) -> None:
        """A launcher, with the listening socket as a service manager would hand it over."""
        fd = self.port.fileno()
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = rig.variables() | {
            "WEIGHTCACHE_RUNTIME_DIR": str(self.agents),
            "WEIGHTCACHE_ENGINES_DIR": str(self.folder / "engines"),
            "WEIGHTCACHE_CACHE_DIR": str(self.folder / "cache"),
            "WEIGHTCACHE_STATE_DIR": str(self.folder / f"state-{slot}"),
            "TMPDIR": str(self.folder / "tmp"),
        }
        script = f'exec 3<&{fd}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        command = ["bash", "-c", script, "bash", sys.executable, "-m", "weightcache.launch"]
        with self.log(slot).open("ab") as log:
            self.launchers[slot] = subprocess.Popen(
                [*command, "--wcache-slot", f"{NAME}-{slot}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=[fd], preexec_fn=end_with_parent,
            )  # fmt: skip

    def log(self, slot: str) -> Path:
        return self.folder / f"log-{slot}"

    def status(self, slot: str) -> status.SlotStatus | None:
        return status.read(self.paths.status(slot))[0]

    def role(self, slot: str) -> str:
        found = self.status(slot)
        return found.role if found else ""

    def until(self, slot: str, role: str, seconds: float) -> status.SlotStatus:
        """Wait for a role."""
        self.wait(lambda: self.role(slot) == role, seconds, f"{slot} to be {role}")
        found = self.status(slot)
        assert found is not None
        return found

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Until ``condition()`` holds; a launcher that ended is an error at once."""
        deadline = time.monotonic() + self.notes.left(seconds)
        while not condition():
            for slot, launcher in self.launchers.items():
                assert launcher.poll() is None, f"the launcher of {slot} ended\n{self.tail(slot)}"
            roles = {slot: self.role(slot) for slot in self.launchers}
            assert time.monotonic() < deadline, f"waited for {what}: {roles}\n{self.tail('a')}\n{self.tail('b')}"
            time.sleep(0.002)

    def tail(self, slot: str) -> str:
        with contextlib.suppress(OSError):
            lines = self.log(slot).read_text(errors="replace").splitlines()[-25:]
            return "\n".join(line[:300] for line in lines)
        return ""

    def ask(self, slot: str, verb: control.Verb) -> None:
        reply = control.ask(self.paths.control(slot), control.Command(verb), 10)
        assert reply.ok, reply.text

    def stop(self) -> None:
        """End both launchers."""
        for launcher in self.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        for launcher in self.launchers.values():
            try:
                launcher.wait(90)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        self.port.close()


class Story:
    """What is done to the slots, step by step."""

    def __init__(self, slots: Slots, notes: Notes, options: argparse.Namespace) -> None:
        self.slots, self.notes, self.options = slots, notes, options
        self.asked = Engine(rig.profile().model, log=slots.folder / "asked", command=["true"], base=())
        self.asked.port = slots.number
        self.active = "a"

    def note(self, name: str, value: Any) -> None:
        self.notes.note(name, value)
        print(f"FIGURE {name}: {value}", flush=True)

    def run(self) -> None:
        """Everything."""
        idle = rig.device_used()
        begin = time.monotonic()
        self.slots.start("a")
        self.slots.until("a", "active", 400)
        self.note("start of the first engine to active, s", round(time.monotonic() - begin, 2))
        expected = rig.answers(self.asked)
        alone = rig.device_used()
        self.note("GPU memory of the active engine, MiB", (alone - idle) // rig.MIB)
        self.note("KV pool, tokens", rig.pool_tokens(self.asked))
        begin = time.monotonic()
        self.slots.start("b")
        self.slots.until("b", "standby", 400)
        self.note("start of the standby, s", round(time.monotonic() - begin, 2))
        self.note("GPU memory of the standby, MiB", (rig.device_used() - alone) // rig.MIB)
        self.notes.finish("stand")
        with Clients(self.slots.number).asking() as clients:
            for number in range(1, self.options.kills + 1):
                self._kill(number, clients)
            self.notes.finish("kills")
            self._hand_over(clients)
            self._park(clients)
        self._errors(clients)
        self.notes.check(rig.answers(self.asked) == expected, "other tokens after all that")
        self.note("KV pool, tokens, afterwards", rig.pool_tokens(self.asked))
        self.notes.finish("all")

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

    def _hand_over(self, clients: Clients) -> None:
        other = OTHER[self.active]
        self.slots.until(other, "standby", 400)
        begin = time.monotonic()
        self.slots.ask(self.active, "retire")
        self.slots.until(other, "active", 60)
        self.note("promote: to active, s", round(time.monotonic() - begin, 3))
        self.slots.wait(lambda: clients.first_after(begin), 60, "an answer")
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
        self.slots.wait(lambda: "active" in map(self.slots.role, "ab"), 60, "an active engine")
        self.note("wake: to active, s", round(time.monotonic() - woken, 3))
        self.slots.wait(lambda: clients.first_after(woken), 60, "an answer")
        self.active = "a" if self.slots.role("a") == "active" else "b"
        self.notes.finish("park")

    def _errors(self, clients: Clients) -> None:
        wrong: dict[str, int] = {}
        for answer in clients.answers:
            if answer.wrong:
                wrong[answer.wrong] = wrong.get(answer.wrong, 0) + 1
        self.note("requests, and what went wrong", {"all": len(clients.answers), **wrong})
        self.notes.check("ConnectionRefusedError" not in wrong, "a connection was refused")
        most = CLIENTS * self.options.kills
        self.notes.check(sum(wrong.values()) <= most, f"more than {most} requests failed: {wrong}")


def main() -> int:
    """Run it."""
    options = arguments()
    notes = Notes(options.out / "standby.json", options.total)
    with tempfile.TemporaryDirectory(prefix="wc-standby-", dir="/tmp") as name:
        folder = Path(name)
        (home := folder / "agent").mkdir()
        agent = rig.Agent(home, model=True).start()
        slots = Slots(folder, home, notes, options)
        try:
            rig.wcache(agent, "load", "--wait", "400")
            Story(slots, notes, options).run()
        except (AssertionError, TimeoutError, subprocess.SubprocessError, OSError) as error:
            notes.failed = f"{type(error).__name__}: {error}"
        finally:
            slots.stop()
            agent.stop()
            for slot in slots.launchers:
                (options.out / f"standby-{slot}.log").write_bytes(slots.log(slot).read_bytes())
        notes.write()
    if seconds := notes.figures.get("seconds"):
        print(
            f"\nSIGKILL to first token, s: median {statistics.median(seconds):.3f}, worst {max(seconds):.3f}, {seconds}"
        )
    for sentence in [*notes.broken, *([notes.failed] if notes.failed else [])]:
        print(f"WRONG {sentence[:5000]}")
    return 1 if notes.broken or notes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
