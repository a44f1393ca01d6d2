"""Agents with a service manager: below `wcache keeper`, or below a fake one that sees all that it is told."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.unit.server import harness
from tests.unit.server.harness import PYTHON, SECONDS, Agent, eventually
from tests.unit.server.manager import FakeManager
from weightcache import keeper
from weightcache.protocol import RankStatus

# The service manager's way of passing descriptors: those in the first argument become 3, 4, ...
PASSING = """
import fcntl, os, sys
numbers, names = sys.argv.pop(1), sys.argv.pop(1)
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 500) for number in numbers.split(",") if number]
for place, fd in enumerate(high): os.dup2(fd, 3 + place)
os.closerange(3 + len(high), 1000)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high)), "LISTEN_FDNAMES": names}
os.execv(sys.argv[1], sys.argv[1:])
"""


class Supervised(Agent):
    """What both have in common. ``patch`` is Python that the agent runs before it starts."""

    def __init__(self, folder: Path, named: Path) -> None:
        super().__init__(folder, named)
        self.patch = ""
        self.environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(folder)}

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        if not (self.folder / "config.toml").exists():
            self.configure()
        first, _, rest = harness.MAIN.partition("; sys.path.insert(0, sys.argv.pop(1)); ")
        main = f"{first}; sys.path.insert(0, sys.argv.pop(1))\n{self.patch}\n{rest}"
        command = [PYTHON, "-I", "-c", main, str(self.named), "--rank", "0"]
        command += ["--config", str(self.folder / "config.toml"), "--runtime-dir", str(self.paths.directory)]
        return [*command, *arguments]

    def _spawn(self, command: list[str], **popen: Any) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **popen
            )
        self.started.append(self.process.pid)

    def loads(self) -> int:
        """How many were begun, by all agents together."""
        return self.text().count("load begins (loader)")


class Kept(Supervised):
    """An agent below `wcache keeper`; ``process`` is the keeper."""

    def start(self, *arguments: str, wait: bool = True, options: tuple[str, ...] = (), **popen: Any) -> Kept:
        keeping = [PYTHON, "-I", "-S", str(Path(keeper.__file__).resolve()), "--listen", str(self.paths.public)]
        keeping += ["--restart-delay", "0.05", *options, "--"]
        self._spawn([*keeping, *self._command(arguments)], **popen)
        if wait:
            eventually(self._answers, what="the agent does not answer")
        return self

    @property
    def pid(self) -> int:
        return self.status().pid

    def kill(self) -> RankStatus:
        """SIGKILL the agent, and wait for the answer of the next one."""
        victim = self.pid
        pidfd = os.pidfd_open(victim)
        os.kill(victim, signal.SIGKILL)
        select.select([pidfd], [], [], SECONDS)
        os.close(pidfd)
        return self.successor(victim)

    def successor(self, victim: int) -> RankStatus:
        """The status of the agent that follows another one."""

        def answer() -> RankStatus | None:
            with contextlib.suppress(Exception):
                status = self.status()
                return status if status.pid != victim else None
            return None

        found: RankStatus = eventually(answer, what=f"no agent after {victim}: {self.text()}")
        return found

    def close(self) -> None:
        pids = []
        with contextlib.suppress(Exception):
            pids.append(self.pid)
        super().close()
        for pid in pids:
            with contextlib.suppress(OSError):  # the agent, if its keeper had to be killed
                if self.named.as_posix() in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)


class Managed(Supervised):
    """An agent below a fake manager, which keeps what is stored from one start to the next."""

    def __init__(self, folder: Path, named: Path) -> None:
        super().__init__(folder, named)
        self.manager = FakeManager(str(folder / "notify"))
        self.environment["NOTIFY_SOCKET"] = self.manager.address
        self.listener: socket.socket | None = None

    def listen(self) -> None:
        """Have a public socket that the manager passes, as for activation."""
        self.paths.directory.mkdir(exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.paths.public))
        self.listener.listen(100)

    def start(self, *arguments: str, wait: bool = True, **popen: Any) -> Managed:
        passed = [("agent", self.listener.fileno())] if self.listener else []
        passed += self.manager.stored
        numbers, names = ",".join(str(fd) for _, fd in passed), ":".join(name for name, _ in passed)
        self.manager.messages.clear()
        self._spawn(
            [PYTHON, "-I", "-S", "-c", PASSING, numbers, names, *self._command(arguments)],
            pass_fds=[fd for _, fd in passed],
            **popen,
        )
        if wait:
            eventually(self._answers, what="the agent does not answer")
        return self

    def ready(self) -> bool:
        """Whether READY=1 was said."""
        return bool(self.manager.sent("READY=1"))

    def await_ready(self) -> RankStatus:
        """Wait for READY=1."""
        self.manager.await_sent("READY=1")
        return self.status()

    def close(self) -> None:
        super().close()
        self.manager.close()
        if self.listener:
            self.listener.close()
