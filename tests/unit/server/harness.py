"""A real agent in a real process, and everything that a test wants to ask it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support import test_loader
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.fingerprint import Fingerprint
from weightcache.paths import RankPaths
from weightcache.protocol import Attach, Attached, RankStatus

PYTHON = "/usr/bin/python3"
LOADER = Path(test_loader.__file__)
SECONDS = 15.0
MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from weightcache.server.__main__ import main; sys.exit(main())"


def eventually(condition: Callable[[], Any], seconds: float = SECONDS, what: str = "") -> Any:
    """Poll ``condition`` until it is true; returns its value."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(what or "the condition did not become true in time")
        time.sleep(0.01)


@dataclass
class Held:
    """An open connection after its first answer, with the descriptors that came."""

    conversation: Conversation
    message: Any
    fds: tuple[int, ...]
    progress: list[protocol.LoadProgress] = field(default_factory=list)

    def close(self) -> None:
        transport.close_all(self.fds)
        self.fds = ()
        self.conversation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Agent:
    """One agent process on one runtime directory; it can be started again and again."""

    def __init__(self, folder: Path, named: Path, rank: int = 0) -> None:
        self.folder = folder
        self.named = named
        self.paths = RankPaths(folder / "run", rank)
        self.gates = folder / "gates"
        self.gates.mkdir(exist_ok=True)
        self.log = folder / (f"log-{rank}" if rank else "log")
        self.process: subprocess.Popen[bytes] | None = None
        self.arguments: list[str] = []
        self.started: list[int] = []

    # -- life ------------------------------------------------------------------------------------------------------

    def configure(
        self,
        environment: dict[str, str] | None = None,
        *,
        model: Sequence[str] | None = ("--model-path", "m"),
        **more: Any,
    ) -> None:
        """Write the configuration; ``more`` are tables to merge."""
        tables: dict[str, dict[str, Any]] = {
            "loader": {
                "command": [PYTHON, str(LOADER)],
                "environment": {"PYTHONPATH": str(self.named), "WCTEST_GATES": str(self.gates), **(environment or {})},
            },
            "memory": {"backend": "host"},
        }
        if model is not None:
            tables["model"] = {"arguments": list(model)}
        for name, table in more.items():
            tables[name] = tables.get(name, {}) | table
        text = "".join(
            f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in t.items()) for name, t in tables.items()
        )
        text += "" if "deployment" in tables else "[[rank]]\nrank = 0\n"
        (self.folder / "config.toml").write_text(text)

    def start(self, *arguments: str, wait: bool = True, user: int | None = None, **popen: Any) -> Agent:
        """Start the process and wait until it answers."""
        if not (self.folder / "config.toml").exists():
            self.configure()
        command = [
            PYTHON,
            "-I",
            "-c",
            MAIN,
            str(self.named),
            "--rank",
            str(self.paths.rank),
            "--config",
            str(self.folder / "config.toml"),
        ]
        command += ["--runtime-dir", str(self.paths.directory), *arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, user=user, **popen)
        self.started.append(self.process.pid)
        if wait:
            eventually(self._answers, what="the agent does not answer")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the agent ended with {self.process.returncode}: {self.text()}")
        try:
            self.status()
        except Exception:
            return False
        return True

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Signal the agent and wait for its end."""
        assert self.process is not None
        self.process.send_signal(sign)
        return self.process.wait(SECONDS)

    def close(self) -> None:
        """End what this test started."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def text(self) -> str:
        """The agent's log. It may be read while a character is being written."""
        return self.log.read_text(errors="replace")

    # -- questions -------------------------------------------------------------------------------------------------

    @contextmanager
    def public(self) -> Iterator[Conversation]:
        with Conversation(self.paths.public) as conversation:
            yield conversation

    def ask(self, message: protocol.Message, answer: type[Any] = protocol.Done, seconds: float = SECONDS) -> Any:
        """One exchange on the status socket."""
        with Conversation(self.paths.status) as conversation:
            return conversation.request(message, answer, seconds)

    def status(self) -> RankStatus:
        status: RankStatus = self.ask(protocol.Status(), protocol.RankReport).status
        return status

    def await_state(self, state: str, seconds: float = SECONDS) -> RankStatus:
        """Wait for a state."""
        eventually(lambda: self.status().state == state, seconds, f"never {state}: {self.status()}")
        return self.status()

    def load(self, wait: float = SECONDS) -> str:
        """Load the configured model."""
        with self.public() as conversation:
            loaded = conversation.request(protocol.Load(wait), protocol.Loaded, wait + SECONDS)
        return loaded.set_id

    def attach(
        self,
        print_: Fingerprint | None = None,
        wait: float = SECONDS,
        donate: bool = False,
        evict: bool = False,
        group: str = "g",
    ) -> Held:
        """Attach and keep the connection."""
        wanted = print_ or test_loader.fingerprint()
        held = Held(Conversation(self.paths.public), None, ())
        try:
            held.conversation.send(Attach(wanted.role, group, wanted, wait, donate, evict))
            while True:
                held.message, held.fds = held.conversation.receive(wait + SECONDS, transport.MAX_FDS)
                if not isinstance(held.message, protocol.Progress):
                    return held
                held.progress.append(held.message.progress)
        except BaseException:
            held.close()
            raise

    def renew(self, set_id: str) -> Held:
        held = Held(Conversation(self.paths.status), None, ())
        held.conversation.send(protocol.Renew(set_id, "target"))
        held.message, _ = held.conversation.receive()
        return held

    def fds(self) -> int:
        """How many descriptors the agent has open when it has come to rest: no child, no connection about to close."""
        seen: list[int] = []
        eventually(lambda: self._at_rest(seen), what=f"the agent does not come to rest: {seen[-10:]}")
        return seen[-1]

    def _at_rest(self, seen: list[int]) -> bool:
        try:
            seen.append(len(list(Path(f"/proc/{self.pid}/fd").iterdir())))
        except PermissionError:
            pytest.skip("an agent that is not dumpable shows its descriptors to root only")
        childless = not Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return childless and len(seen) > 5 and len(set(seen[-5:])) == 1

    def await_fds(self, count: int) -> None:
        """Wait until the agent has ``count`` descriptors again."""
        found = [0]

        def reached() -> bool:
            found[0] = self.fds()
            return found[0] == count

        try:
            eventually(reached)
        except AssertionError:
            kinds = sorted(str(path.readlink()) for path in Path(f"/proc/{self.pid}/fd").iterdir())
            raise AssertionError(f"{found[0]} descriptors instead of {count}: {kinds}") from None

    # -- gates -----------------------------------------------------------------------------------------------------

    def gate(self, name: str) -> None:
        """Make the loader stop at a gate."""
        os.mkfifo(self.gates / name)

    def reached(self, name: str) -> int:
        """Wait until a loader is at the gate; its pid."""
        path = self.gates / f"{name}.reached"
        eventually(path.exists, what=f"no loader at {name}: {self.text()}")
        return int(path.read_text())

    def open(self, name: str) -> None:
        """Let the loader pass, and all that come later."""
        (self.gates / name).rename(self.gates / f"{name}.open")
        with (self.gates / f"{name}.open").open("wb") as fifo:
            fifo.write(b"1")

    def lift(self, name: str) -> None:
        """Let those pass that come later; nobody waits there any more."""
        (self.gates / name).unlink()


@contextmanager
def donation(agent: Agent, token: str) -> Iterator[Conversation]:
    """A donor's conversation on the publish socket, after Begin."""
    with Conversation(agent.paths.publish) as conversation:
        conversation.request(protocol.Begin("donor", "g", token), protocol.Accepted)
        yield conversation


def outcome(conversation: Conversation) -> tuple[protocol.Message, tuple[int, ...]]:
    """The first answer that is no progress report."""
    while True:
        message, fds = conversation.receive(SECONDS, transport.MAX_FDS)
        if not isinstance(message, protocol.Progress):
            return message, fds


def contents(held: Held) -> list[bytes]:
    """The bytes of the arenas that came with Attached."""
    assert isinstance(held.message, Attached)
    return [os.pread(fd, arena.bytes, 0) for fd, arena in zip(held.fds[1:], held.message.arenas, strict=True)]


def gone(pid: int) -> bool:
    """Whether a process that is not a child of this one has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
