"""Two launchers of one engine, over a stand-in for SGLang, and clients that open a connection for each request."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import weightcache
from tests.unit.launch.support import alive, eventually
from weightcache.standby import control, status
from weightcache.standby.places import EnginePaths

FAKE = Path(__file__).parent / "fake"
SOURCE = Path(weightcache.__file__).parent.parent
NAME = "demo"
OTHER = {"a": "b", "b": "a"}
CLOCKS = 0.01
"""Seconds by which the clocks of a promotion may differ."""
CODE = """
import os, sys
from weightcache.launch import main, restart
from weightcache.standby import engine_config
engine_config.LEAST_HANG = 0.1
main.HOPELESS_SECONDS = 0.5
restart.FIRST_PAUSE = float(os.environ.get("FIRST_PAUSE", "0.05"))
raise SystemExit(main.main(sys.argv[1:]))
"""


@dataclass
class Slots:
    """The engine ``demo``. ``notify``: the address that a slot's launcher has as $NOTIFY_SOCKET."""

    folder: Path
    runtime: Path
    port: socket.socket
    notify: dict[str, str] = field(default_factory=dict)
    launchers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    hang_seconds: float = 5.0
    name: str = NAME
    priority: int = 0
    more: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of the launcher."""

    def __post_init__(self) -> None:
        self.paths = EnginePaths(self.runtime / "engines", self.name)
        self.journal = self.folder / "fake"
        self.journal.mkdir()
        self.address = self.port.getsockname()
        self.configure()

    def configure(self, **standby: float) -> None:
        values = {"hang_seconds": self.hang_seconds, "drain_seconds": 5.0, "own_seconds": 20.0, **standby}
        lines = "\n".join(f"{name} = {value}" for name, value in values.items())
        arguments = [*self.arguments(), "--port", str(self.address[1])]
        (self.folder / "engines").mkdir(exist_ok=True)
        (self.folder / "engines" / f"{self.name}.toml").write_text(
            f"[engine]\npriority = {self.priority}\narguments = {json.dumps(arguments)}\n"
            "on_mismatch = 'fallback'\nwithout = ['caches']\n"
            f"environment = {{ FROM_FILE = 'yes' }}\n[standby]\n{lines}\n"
        )

    def arguments(self) -> list[str]:
        return ["--model-path", "m", "--device", "cpu", "--tp-size", "2"]

    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "WEIGHTCACHE", "FAKE", "NOTIFY"))}
        return {**env, "PYTHONPATH": os.pathsep.join([str(FAKE), str(SOURCE)]), "FAKE_SLOT": str(self.journal)}

    def start(self, *slots: str) -> None:
        for slot in slots:
            self.launchers[slot] = self.launcher(slot)

    def launcher(self, slot: str, handed: bool = True) -> subprocess.Popen[str]:
        env = {
            **self.environment(),
            "WEIGHTCACHE_RUNTIME_DIR": str(self.runtime),
            "WEIGHTCACHE_ENGINES_DIR": str(self.folder / "engines"),
            "WEIGHTCACHE_CACHE_DIR": str(self.folder / "cache"),
            "WEIGHTCACHE_STATE_DIR": str(self.folder / f"state-{slot}"),
            "TMPDIR": str(self.runtime),
            **self.notify,
            **self.more,
        }
        fd = self.port.fileno()
        hand = f"exec 3<&{fd}; export LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$; " if handed else ""
        shell = ["bash", "-c", f'{hand}exec "$@"', "bash"]
        with (self.folder / f"log-{slot}").open("a") as log:
            return subprocess.Popen(
                [*shell, sys.executable, "-c", CODE, "--wcache-slot", f"{self.name}-{slot}", *self.options],
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, cwd=self.folder, pass_fds=[fd],
            )  # fmt: skip

    # -- what they say -------------------------------------------------------------------------------------------------

    def status(self, slot: str) -> status.SlotStatus | None:
        found, problem = status.read(self.paths.status(slot))
        assert not problem, problem
        return found

    def role(self, slot: str) -> str:
        found = self.status(slot)
        return found.role if found else ""

    def until(self, slot: str, role: str, seconds: float = 20) -> status.SlotStatus:
        assert eventually(lambda: self.role(slot) == role, seconds), f"{slot}: {self.role(slot)}\n{self.log(slot)}"
        found = self.status(slot)
        assert found is not None
        return found

    def stand(self, seconds: float = 30) -> str:
        """Wait until one is active and the other one stands by; which one is active."""
        assert eventually(lambda: sorted(map(self.role, "ab")) == ["active", "standby"], seconds), self.say()
        return "a" if self.role("a") == "active" else "b"

    def ask(self, slot: str, verb: control.Verb) -> control.Reply:
        return control.ask(self.paths.control(slot), control.Command(verb), 10)

    def log(self, slot: str) -> str:
        return (self.folder / f"log-{slot}").read_text()

    def lines(self, slot: str) -> list[str]:
        """What the launcher said of its slot."""
        start = f"weightcache: slot {self.name}-{slot}: "
        return [line[len(start) :] for line in self.log(slot).splitlines() if line.startswith(start)]

    def say(self) -> str:
        return "\n".join(f"{slot}: {self.role(slot)}\n{self.log(slot)}" for slot in "ab" if slot in self.launchers)

    # -- what is done to them ------------------------------------------------------------------------------------------

    def kill(self, slot: str, what: str) -> None:
        """SIGKILL to the main process, a rank, the launcher or everything of a slot."""
        found = self.status(slot)
        assert found is not None
        assert found.main is not None
        ranks = [rank.pid for rank in found.ranks]
        pids = {
            "main": [found.main.pid],
            "rank": ranks[-1:],
            "launcher": [found.launcher.pid],
            "everything": [found.launcher.pid, found.main.pid, *ranks],
        }[what]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if found.launcher.pid in pids:
            self.launchers.pop(slot).wait(10)

    def close(self) -> None:
        for process in self.launchers.values():
            process.kill()
            process.wait(10)
        for path in self.journal.glob("pid-*"):
            pid = int(path.name.rpartition("-")[2])
            with contextlib.suppress(OSError):
                if b"sglang.launch_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: not alive(pid)), pid

    # -- what is checked -----------------------------------------------------------------------------------------------

    def owned(self) -> dict[str, list[tuple[float, float, str]]]:
        """By kind, in order: since when, until when at least, and by which process it was owned."""
        found: dict[str, list[tuple[float, float, str]]] = {}
        for path in self.journal.glob("owns-*"):
            _, kind, slot, pid, _ = path.name.split("-")
            since, until = struct.unpack("dd", path.read_bytes())
            found.setdefault(kind, []).append((since, until, f"{slot} {pid}"))
        return {kind: sorted(times) for kind, times in found.items()}

    def check_promotions(self, events: list[float]) -> None:
        """One at the start, and one for each event (seconds since 1970): the lock was taken after it, not before."""
        promotions = [one for slot in "ab" if (found := self.status(slot)) for one in found.promotions]
        begun = sorted(one.at - one.seconds for one in promotions)
        assert len(begun) == 1 + len(events), (begun, events)
        for event, since in zip(events, begun[1:], strict=True):
            assert since >= event - CLOCKS, f"somebody had the lock from {since}, before {event}"

    def check_never_two(self) -> None:
        for kind, times in self.owned().items():
            for (_, until, one), (since, _, other) in itertools.pairwise(times):
                assert until <= since, f"{kind}: {one} still had it at {until}, and {other} at {since}"


@dataclass
class Watch:
    """Looks again and again who says to be active."""

    slots: Slots
    active: set[str] = field(default_factory=set)
    both: list[str] = field(default_factory=list)
    """Two that did so at the same time, and whose main processes lived."""
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.wait(0.05):
            first, second = self._active("a"), self._active("b")
            self.active |= {slot for slot, found in (("a", first), ("b", second)) if found}
            # The first one was there before and after the second one was seen.
            if first and second and self._active("a") == first:
                self.both.append(f"{first}, {second}")

    def _active(self, slot: str) -> str:
        found, _ = status.read(self.slots.paths.status(slot))
        if found is None or found.role != "active" or found.main is None or not alive(found.main.pid):
            return ""
        return f"{slot}: {found.main} since {found.since}"


@contextlib.contextmanager
def watching(slots: Slots) -> Iterator[Watch]:
    """Inside, it is watched that there are never two active engines, and in the end that both slots had one."""
    watch = Watch(slots)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()
        thread.join(10)
    assert watch.both == []
    assert watch.active == {"a", "b"}


@dataclass(frozen=True)
class Answer:
    """``who`` is empty for a request that failed after it was connected, and None for a refused connection."""

    began: float
    ended: float
    who: str | None


def request(address: tuple[str, int], seconds: float = 0.0, timeout: float = 30) -> Answer:
    began = time.monotonic()
    try:
        sock = socket.create_connection(address, timeout)
    except OSError:
        return Answer(began, time.monotonic(), None)
    with sock:
        data = b""
        try:
            sock.sendall(f"GET /{seconds or ''} HTTP/1.0\r\n\r\n".encode())
            while chunk := sock.recv(4096):
                data += chunk
        except OSError:
            data = b""
    return Answer(began, time.monotonic(), data.rpartition(b"\r\n\r\n")[2].decode())


@contextlib.contextmanager
def clients(address: tuple[str, int], count: int) -> Iterator[list[Answer]]:
    """So many clients that ask one request after the other, each on a connection of its own."""
    answers: list[Answer] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(request(address))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
