"""A real agent for one rank, with the real loader behind it, as a process that a test starts, asks, kills and stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from tests.support.engine import CPU_ARGUMENTS, end_with_parent
from tests.support.environments import NEWEST, engine_variables, environments
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.paths import RankPaths
from weightcache.protocol import Attached, RankStatus

START_SECONDS = 20.0
LOAD_SECONDS = 240.0
VARIABLES = ("PYTHONPATH", "PYTHONUNBUFFERED", "SGLANG_DISABLE_TELEMETRY")
"""What SGLang on the CPU needs, for a loader that inherits an agent's environment."""

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float, what: Callable[[], str] | str = "") -> T:
    """Ask ``condition`` until it is true and return its value; an AssertionError with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(text or f"did not come true within {seconds:g} s")
        time.sleep(0.02)
    return value


class Agent:
    """One agent. ``with Agent(runtime_dir, model=path) as agent: agent.load()``; it may be started again afterwards.

    ``folder`` has a short path and holds the configuration, the log and, in ``run``, the sockets; agents of several
    ranks may share it. Without ``model`` the agent holds only what engines donate. ``version`` chooses the SGLang that
    loads, ``command`` another loader, ``variables`` are added to the loader's, ``policy`` is the table of that name.
    ``deployment`` is the table of that name, for ranks that load together: all must be given the same.
    With ``keeper`` the agent runs under ``wcache keeper``, which ends with this process. ``within`` comes before its
    command, and has to become it (netns.py).
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        version: str = NEWEST,
        model: Path | None = None,
        arguments: Sequence[str] = (),
        command: Sequence[str | Path] = (),
        variables: Mapping[str, str] | None = None,
        policy: Mapping[str, Any] | None = None,
        deployment: Mapping[str, Any] | None = None,
        arena_bytes: int = 0,
        keeper: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.paths = RankPaths(self.runtime_dir, rank)
        self.config = folder / f"{rank}.toml"
        self.log = folder / f"agent-{rank}.log"
        self.keeper = keeper
        self.within = within
        self._process: subprocess.Popen[bytes] | None = None
        needed = engine_variables()
        loader = {
            "command": list(map(str, command or (environments().engine(version), "-m", "weightcache.loader"))),
            "environment": {**{name: needed[name] for name in VARIABLES}, **(variables or {})},
        }
        tables: dict[str, Mapping[str, Any]] = {
            "loader": loader,
            "memory": {"backend": "host", "arena_bytes": arena_bytes},
        }
        if model is not None:
            tables["model"] = {"arguments": ["--model-path", str(model), *CPU_ARGUMENTS, *arguments]}
        if policy is not None:
            tables["policy"] = policy
        if deployment is not None:
            tables["deployment"] = deployment
        text = [
            f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items()) for name, table in tables.items()
        ]
        text += [] if deployment is not None else [f"[[rank]]\nrank = {rank}\n"]
        self.config.write_text("".join(text))

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started: the keeper, or else the agent."""
        assert self._process is not None, "the agent was not started"
        return self._process

    @property
    def pid(self) -> int:
        """The agent's number. Under a keeper each agent has its own."""
        return self.status().pid if self.keeper else self.process.pid

    @property
    def rss(self) -> int:
        """Its resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def arenas(self) -> int:
        """How many memory files it has open: the arenas and the manifest of every set, also of half-made ones."""
        found = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += str(entry.readlink()).startswith("/memfd:")
        return found

    def start(self) -> Self:
        """Start the process and wait until it answers."""
        command = [str(environments().agent), "-m", "weightcache.server", "--rank", str(self.rank)]
        command += ["--config", str(self.config), "--runtime-dir", str(self.runtime_dir)]
        if self.keeper:
            wcache = environments().agent.with_name("wcache")
            command = [str(wcache), "keeper", "--listen", str(self.paths.public), "--", *command]
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "WEIGHTCACHE_", "PYTEST_", "PYTHON"))
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.within, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=kept,
                start_new_session=self.keeper,  # Ctrl-C is for whoever started this
                preexec_fn=end_with_parent if self.keeper else None,
            )
        return self.await_answer()

    def await_answer(self) -> Self:
        """Wait until an agent answers: the first one, or a keeper's next one."""
        eventually(self._answers, START_SECONDS, lambda: f"the agent does not answer\n{self.text()}")
        return self

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the agent ended with {self.process.returncode}\n{self.text()}")
        try:
            return self.status().pid == self.pid
        except Exception:
            return False

    def status(self) -> RankStatus:
        """What it says of itself."""
        with Conversation(self.paths.status) as conversation:
            return conversation.request(protocol.Status(), protocol.RankReport).status

    def await_state(self, state: str, seconds: float = LOAD_SECONDS) -> RankStatus:
        """Wait for a state."""
        what = f"the agent never was {state}"
        eventually(lambda: self.status().state == state, seconds, lambda: f"{what}: {self.status()}\n{self.text()}")
        return self.status()

    def load(self, seconds: float = LOAD_SECONDS) -> str:
        """Load the configured model and return the set's id. Raises the agent's refusal."""
        with Conversation(self.paths.public) as conversation:
            return conversation.request(protocol.Load(seconds), protocol.Loaded, seconds + 10).set_id

    def inodes(self, set_id: str | None = None) -> frozenset[int]:
        """The inodes of a set's arenas (sealed memfds): what an attached engine must map, and nothing else."""
        with Conversation(self.paths.status) as conversation:
            conversation.send(protocol.Inspect(set_id))
            answer, fds = conversation.receive(max_fds=transport.MAX_FDS)
        try:
            assert isinstance(answer, Attached), answer
            return frozenset(os.fstat(fd).st_ino for fd in fds[1:])
        finally:
            transport.close_all(fds)

    def wcache(self, *arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run ``wcache`` against this agent, in the small environment."""
        command = [str(environments().agent.with_name("wcache")), *arguments]
        command += ["--config", str(self.config), "--runtime-dir", str(self.runtime_dir)]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL it, and wait for its end. A keeper starts another one."""
        agent = psutil.Process(self.pid)
        agent.kill()
        if self.keeper:
            agent.wait(20)
        else:
            self.process.wait(20)

    def stop(self) -> None:
        """End it, as systemd would."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            if self.keeper:  # the second signal makes it kill the agent
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(20)
            else:
                self.kill()
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
