"""Both slots of an engine under their launchers, as units would run them, and clients that ask all the time."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import rig
from tests.gpu.notes import Notes
from tests.gpu.starts import FIRST, GPU_BASE
from tests.support.engine import end_with_parent
from weightcache.standby import control, status
from weightcache.standby.places import EnginePaths

OTHER = {"a": "b", "b": "a"}
CLIENTS = 4
PAUSE_SECONDS = 0.02
REQUEST_SECONDS = 120.0
"""Longer than a whole start: nobody is answered by giving up."""
END_SECONDS = 2.0
"""For the last requests."""


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
    _open: set[http.client.HTTPConnection] = field(default_factory=set)

    @contextlib.contextmanager
    def asking(self) -> Iterator[Clients]:
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            time.sleep(END_SECONDS)
            for connection in list(self._open):  # whoever waits for an engine that is parked
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(END_SECONDS)

    def _run(self) -> None:
        body = json.dumps({"input_ids": FIRST, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        while not self._stop.wait(PAUSE_SECONDS):
            sent, wrong = time.monotonic(), ""
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
            self._open.add(connection)
            try:
                connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                wrong = "" if answer.status == 200 else f"status {answer.status}"
            except (OSError, http.client.HTTPException) as error:
                wrong = type(error).__name__
            finally:
                self._open.discard(connection)
                connection.close()
            if not (wrong and self._stop.is_set()):
                self.answers.append(Answered(sent, time.monotonic(), wrong))

    def wrong(self) -> dict[str, int]:
        """How often what went wrong."""
        return dict(collections.Counter(answer.wrong for answer in list(self.answers) if answer.wrong))

    def answered_after(self, moment: float) -> float | None:
        """When the first good answer came after ``moment``, whenever its request was sent."""
        return min((a.done for a in list(self.answers) if a.done >= moment and not a.wrong), default=None)

    def first_after(self, moment: float) -> float | None:
        """When the first request that was sent after ``moment`` was answered well."""
        return min((a.done for a in list(self.answers) if a.sent >= moment and not a.wrong), default=None)


@dataclass(frozen=True, slots=True)
class Described:
    """What an engine's file says: more of SGLang's arguments, levers that are not used, and the other tables' lines.

    ``model`` and ``base`` take the place of the machine's own.
    """

    sglang: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    engine: str = ""
    standby: str = ""
    model: Path | None = None
    base: tuple[str, ...] = ()

    def text(self, port: int) -> str:
        """The file."""
        profile = rig.profile()
        base = self.base or (GPU_BASE if profile.backend == "cuda" else profile.base)
        given = ["--model-path", str(self.model or profile.model), *base, *self.sglang, "--port", str(port)]
        engine = f"[engine]\narguments = {json.dumps(given)}\nwithout = {json.dumps(list(self.without))}\n"
        return f"{engine}{self.engine}\n[standby]\n{self.standby}\n"


class Slots:
    """Both slots of one engine, over an agent that holds the model. ``folder`` is shared with other engines."""

    def __init__(
        self, folder: Path, agents: Path, notes: Notes, name: str, described: Described, cache: Path | None
    ) -> None:
        self.folder, self.agents, self.notes, self.name = folder, agents, notes, name
        self.port = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.number = self.port.getsockname()[1]
        self.paths = EnginePaths(agents / "engines", name)
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.cache = cache or folder / "cache"
        (folder / "engines").mkdir(exist_ok=True)
        (folder / "engines" / f"{name}.toml").write_text(described.text(self.number))

    def start(self, slot: str) -> None:
        """A launcher, with the listening socket as a service manager would hand it over."""
        fd = self.port.fileno()
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = rig.variables() | {
            "WEIGHTCACHE_RUNTIME_DIR": str(self.agents),
            "WEIGHTCACHE_ENGINES_DIR": str(self.folder / "engines"),
            "WEIGHTCACHE_CACHE_DIR": str(self.cache),
            "WEIGHTCACHE_STATE_DIR": str(self.folder / f"state-{self.name}-{slot}"),
            "TMPDIR": str(self.folder / "tmp"),
        }
        script = f'exec 3<&{fd}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        command = ["bash", "-c", script, "bash", sys.executable, "-m", "weightcache.launch"]
        with self.log(slot).open("ab") as log:
            self.launchers[slot] = subprocess.Popen(
                [*command, "--wcache-slot", f"{self.name}-{slot}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=[fd], preexec_fn=end_with_parent,
            )  # fmt: skip

    def log(self, slot: str) -> Path:
        return self.folder / f"log-{self.name}-{slot}"

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

    def said(self, slot: str) -> list[str]:
        """The lines of a slot's log."""
        return self.log(slot).read_text(errors="replace").splitlines()

    def tail(self, slot: str) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(line[:300] for line in self.said(slot)[-25:])
        return ""

    def ask(self, slot: str, verb: control.Verb) -> None:
        reply = control.ask(self.paths.control(slot), control.Command(verb), 10)
        assert reply.ok, reply.text

    @contextlib.contextmanager
    def kept(self, out: Path) -> Iterator[Slots]:
        """While the block runs; then both launchers are ended, and their logs are in ``out``."""
        try:
            yield self
        finally:
            self.stop(*self.launchers)
            self.port.close()
            for log in self.folder.glob(f"log-{self.name}-*"):
                (out / f"standby-{log.name}.log").write_bytes(log.read_bytes())

    def stop(self, *slots: str) -> None:
        """End these launchers."""
        ended = [self.launchers.pop(slot) for slot in slots]
        for launcher in ended:
            launcher.send_signal(signal.SIGTERM)
        for launcher in ended:
            try:
                launcher.wait(90)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
