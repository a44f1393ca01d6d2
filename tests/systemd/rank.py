"""The real agent of one rank inside a machine, with the loader for tests, seen from outside.

The questions are those of the agent's unit tests: a machine's files, sockets among them, can be reached from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from tests.support import test_loader
from tests.support.agent import eventually as poll
from tests.support.environments import REPOSITORY
from tests.systemd.machine import Inside, Machine
from tests.unit.server.harness import Agent
from weightcache.errors import WeightcacheError
from weightcache.paths import RankPaths
from weightcache.protocol import RankStatus
from weightcache.server.journal import Name

CONFIG = "/etc/weightcache/weightcache.toml"
RUN = "/run/weightcache"
LIBRARY = "/usr/lib/weightcache"
AGENT_GATES = f"{RUN}/gates"
LOADER_GATES = "/var/cache/weightcache/gates"
TARGET = "weightcache.target"
LOADERS = "weightcache-loader@*.service"
CANARY = 1
RECORD_AND_MANIFEST = 2
SECONDS = 20.0
ARENAS = len(test_loader.ARENAS)
ONE_SET = CANARY + RECORD_AND_MANIFEST + ARENAS
"""Descriptors in the store for one set of the test loader."""

GATED_AGENT = REPOSITORY / "tests" / "systemd" / "gated_agent.py"
_CLIENT = REPOSITORY / "tests" / "systemd" / "client.py"


T = TypeVar("T")


def eventually(condition: Callable[[], T], what: Callable[[], object] = lambda: "") -> T:
    """Poll until ``condition`` is true; else an AssertionError with ``what``."""
    return poll(condition, SECONDS, lambda: str(what()))


def configuration(environment: Mapping[str, str] | None = None, loader: str = "", more: str = "") -> str:
    """A file with the test loader; ``loader`` are lines of its table, ``more`` are tables."""
    variables = {"PYTHONPATH": LIBRARY, "WCTEST_GATES": LOADER_GATES, **(environment or {})}
    inline = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
    return f"""\
[loader]
command = ["/usr/bin/python3", "{REPOSITORY}/tests/support/test_loader.py"]
environment = {{ {inline} }}
{loader}
[model]
arguments = ["--model-path", "m"]
[memory]
backend = "host"
[[rank]]
rank = 0
[[rank]]
rank = 1
{more}"""


def gated(environment: str = "") -> str:
    """A drop-in for the agent's unit: the same program with gates inside."""
    unit = (REPOSITORY / "agent" / "units" / "weightcache@.service").read_text()
    [line] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    arguments = line.partition(" ")[2]
    return (
        f"[Service]\nExecStart=\nExecStart=/usr/bin/python3 -IB {GATED_AGENT} {arguments}\nEnvironment={environment}\n"
    )


class Rank(Agent):
    """One rank of a machine."""

    def __init__(self, machine: Machine, number: int = 0) -> None:
        self.machine = machine
        self.number = number
        self.service = f"weightcache@{number}.service"
        self.socket = f"weightcache@{number}.socket"
        self.locate()
        self.since = machine.cursor()

    def locate(self) -> None:
        """Find the machine's files, again after a reboot."""
        self.paths = RankPaths(self.machine.path(RUN), self.number)
        self.gates = self.machine.path(LOADER_GATES)

    # -- life ------------------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Replace the configuration; an agent reads it when it starts."""
        self.machine.write_file(CONFIG, text)

    def begin(self, unit: str = "") -> None:
        """Ask the manager to start the agent, and do not wait for READY."""
        self.machine.systemctl("start", "--no-block", unit or self.service)

    def ready(self) -> RankStatus:
        """Start the agent, wait for READY."""
        self.machine.systemctl("start", self.service)
        return self.status()

    def kill(self) -> int:
        """SIGKILL the agent; its number."""
        pid = self.machine.main_pid(self.service)
        self.machine.kill(pid)
        return pid

    def killed(self) -> RankStatus:
        """SIGKILL the agent, and wait until the next one answers and is READY."""
        return self.successor(self.kill())

    def successor(self, pid: int) -> RankStatus:
        """Wait until another agent than ``pid`` answers and is READY."""
        status = eventually(lambda: self._other(pid), lambda: f"no agent after {pid}: {self.show()}")
        assert status is not None
        self.await_active()
        return status

    def _other(self, pid: int) -> RankStatus | None:
        with contextlib.suppress(WeightcacheError):
            if (status := self.status()).pid != pid:
                return status
        return None

    def await_active(self) -> None:
        """Wait until the manager has seen READY."""
        eventually(lambda: self.show()["ActiveState"] == "active", self.show)

    def show(self, *names: str) -> dict[str, str]:
        """Properties of the service."""
        return self.machine.show(self.service, *(names or ("ActiveState", "SubState", "StatusText", "NRestarts")))

    @property
    def stored(self) -> int:
        """How many descriptors the manager keeps."""
        return self.machine.stored(self.service)

    @property
    def restarts(self) -> int:
        """How often the manager has started the agent again by itself."""
        return int(self.show("NRestarts")["NRestarts"])

    @property
    def status_text(self) -> str:
        """What the agent said last for ``systemctl status``."""
        return self.show("StatusText").get("StatusText", "")

    def ids(self) -> list[str]:
        """The resident sets."""
        return [resident.id for resident in self.status().sets]

    # -- journal ---------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Count what happens from here on."""
        self.since = self.machine.cursor()

    def entries(self) -> list[dict[str, Any]]:
        """What this rank's agents logged since the mark. Not by unit: the journal may see an entry after its writer."""
        self.machine.run("journalctl", "--sync")
        chosen = (
            "--quiet",
            "--all",
            "--output=json",
            f"--after-cursor={self.since}",
            f"WEIGHTCACHE_RANK={self.number}",
        )
        return [json.loads(line) for line in self.machine.run("journalctl", *chosen).stdout.splitlines()]

    def events(self, name: Name) -> list[dict[str, Any]]:
        """The events of one kind since the mark."""
        return [entry for entry in self.entries() if entry.get("WEIGHTCACHE_EVENT") == name]

    def count(self, *names: Name) -> tuple[int, ...]:
        """How often each of these happened since the mark."""
        seen = [entry.get("WEIGHTCACHE_EVENT") for entry in self.entries()]
        return tuple(seen.count(name) for name in names)

    def text(self) -> str:
        return "\n".join(str(entry.get("MESSAGE")) for entry in self.entries())

    # -- gates -----------------------------------------------------------------------------------------------------

    @contextmanager
    def inside_agent(self) -> Iterator[None]:
        """Use the gates of gated_agent.py instead of the loader's."""
        outside, self.gates = self.gates, self.machine.path(AGENT_GATES)
        try:
            yield
        finally:
            self.gates = outside

    def gate(self, name: str) -> None:
        super().gate(name)
        (self.gates / name).chmod(0o666)

    def reached(self, name: str) -> int:
        """Wait until somebody is at the gate; its number inside. The next call waits for the next one."""
        path = self.gates / f"{name}.reached"
        eventually(path.exists, lambda: f"nobody at {name}: {self.show()} {self.text()}")
        pid = int(path.read_text())
        path.unlink()
        return pid

    def open_all(self) -> None:
        """Open and remove all gates."""
        open_gates(self.machine)

    # -- loaders ---------------------------------------------------------------------------------------------------

    def no_arenas(self) -> None:
        """Wait until nobody holds weights."""
        eventually(lambda: not arenas(self.machine), lambda: f"somebody holds {arenas(self.machine)}")

    def no_loader(self) -> None:
        """Wait until no loader and no unit of one is left."""
        eventually(lambda: not loaders(self.machine), lambda: loaders(self.machine))

    def alive(self, pid: int) -> bool:
        """Whether a process inside runs."""
        return self.machine.path(f"/proc/{pid}").exists()


def loaders(machine: Machine) -> list[str]:
    """The units of loaders, and processes of their user outside of units."""
    units = machine.systemctl("list-units", "--all", "--plain", "--no-legend", LOADERS).splitlines()
    processes = machine.run("pgrep", "--uid", "weightcache-loader", check=False).stdout.split()
    return [unit.split()[0] for unit in units] + processes


def arenas(machine: Machine, besides: int = 0) -> set[int]:
    """The arenas of the loader for tests that any process inside but ``besides`` has open, PID 1 among them."""
    found = set()
    for process in machine.path("/proc").glob("[0-9]*"):
        if process.name == str(besides):
            continue
        # Meanwhile a process may end, and a descriptor be closed.
        with contextlib.suppress(OSError):
            for path in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if path.readlink().name.startswith("memfd:test-arena"):
                        found.add(path.stat().st_ino)
    return found


def open_gates(machine: Machine) -> None:
    """Open and remove all gates of agents and loaders."""
    for folder in (AGENT_GATES, LOADER_GATES):
        for path in machine.path(folder).iterdir():
            if path.is_fifo():
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(fd, b"1")
                    os.close(fd)
            path.unlink()


def prepare(machine: Machine) -> None:
    """Make the folders of the gates, and compile, as packages do when they are installed: what runs here at least."""
    machine.run("/usr/bin/python3", "-m", "compileall", "-q", f"{LIBRARY}/weightcache", f"{LIBRARY}/vendor/sdnotify")
    for path, user in ((AGENT_GATES, "weightcache"), (LOADER_GATES, "weightcache-loader")):
        machine.run("install", "-d", "-m", "755", "-o", user, Path(path).parent, path)


def reset(machine: Machine, text: str, numbers: Sequence[int] = (0,)) -> None:
    """Nothing runs, nothing is held or remembered; sockets listen."""
    open_gates(machine)
    machine.systemctl("stop", *(f"weightcache@{number}.service" for number in numbers))
    for number in numbers:
        for path in machine.path(RUN).glob(f"{number}.*"):
            if path.is_file():
                path.unlink()
    machine.systemctl("reset-failed")
    machine.write_file(CONFIG, text)
    machine.systemctl("start", "weightcache-loader.socket", *(f"weightcache@{number}.socket" for number in numbers))


class Client:
    """An engine inside (client.py): it has mapped a set and keeps its lease."""

    def __init__(self, rank: Rank, role: str = "target") -> None:
        self.rank = rank
        self._process: Inside = rank.machine.popen(
            ["/usr/bin/python3", "-IB", _CLIENT, str(rank.number), role],
            user="member",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        first = self.look()
        self.set_id, self.pid = str(first["set"]), int(first["pid"])

    def look(self) -> dict[str, Any]:
        """What the client sees now."""
        print(file=self._in, flush=True)
        line = self._out.readline()
        assert line, f"the client ended: {self.rank.text()}"
        seen: dict[str, Any] = json.loads(line)
        return seen

    def unharmed(self, arenas: Sequence[int] = test_loader.ARENAS, seed: int = 0) -> None:
        """The bytes are the loader's, and what was mapped in the beginning."""
        expected = [test_loader.digest(test_loader.arena_bytes(seed, n, size)) for n, size in enumerate(arenas)]
        assert self.look()["digests"] == expected

    def leased(self) -> bool:
        """Whether the agent counts this client among the users of its set."""
        with contextlib.suppress(WeightcacheError):
            held = {resident.id: [lease.pid for lease in resident.leases] for resident in self.rank.status().sets}
            return held.get(self.set_id) == [self.pid]
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
