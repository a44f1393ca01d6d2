"""A real SGLang server on the CPU, as a process of its own that a test starts, asks and stops."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.environments import NEWEST, engine_variables, environments

CPU_ARGUMENTS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    *("--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "4096"),
)
START_SECONDS = 180.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def end_with_parent() -> None:
    """In a new child: SIGTERM when the test process is gone, however it ended. A session of its own outlives Ctrl-C."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class EngineFailed(Exception):
    """The engine ended, or did not get ready in time. The message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port that nobody listens on now.

    Below those that the kernel gives to connections: between now and the engine's start, one of them would take it.
    """
    for _ in range(100):
        port = random.randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineFailed("no free port was found")


class Engine:
    """One server. ``with Engine(model, log=path) as engine: engine.generate("...")``.

    ``command`` is what comes before SGLang's own arguments: another launcher, for instance. ``arguments`` are added to
    ``base``, what any engine on the CPU needs; ``environment`` is added to its variables. The process leads a session
    of its own.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        version: str = NEWEST,
        command: Sequence[str | Path] = (),
        arguments: Sequence[str] = (),
        base: Sequence[str] = CPU_ARGUMENTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = log
        self.argv = [
            *map(str, command or (environments().engine(version), "-m", "sglang.launch_server")),
            *("--model-path", str(model), "--port", str(self.port)),
            *base,
            *arguments,
        ]
        self.environment = {**engine_variables(), **(environment or {})}
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started."""
        if self._process is None:
            raise EngineFailed("the engine was not started")
        return self._process

    def start(self) -> Self:
        """Start the process and return at once."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        return self

    def wait_ready(self, timeout: float = START_SECONDS) -> Self:
        """Wait until the server takes requests. Asks for /model_info: /health sleeps and generates."""
        start = time.monotonic()
        while not self._answers():
            if self.process.poll() is not None:
                raise EngineFailed(f"the engine exited with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() - start > timeout:
                raise EngineFailed(f"the engine was not ready after {timeout:g} s\n{self.tail()}")
            time.sleep(0.1)
        self.start_seconds = time.time() - psutil.Process(self.process.pid).create_time()
        return self

    def generate(self, prompt: str, max_new_tokens: int = 16, timeout: float = 120.0) -> str:
        """The greedy continuation of ``prompt``."""
        return str(self._generated({"text": prompt}, {"max_new_tokens": max_new_tokens}, timeout)["text"])

    def tokens(self, prompt: Sequence[int], count: int = 16, timeout: float = 120.0) -> list[int]:
        """Exactly ``count`` greedy tokens: what to compare for random models, whose text may be empty or unreadable."""
        sampling = {"max_new_tokens": count, "ignore_eos": True}
        return list(map(int, self._generated({"input_ids": list(prompt)}, sampling, timeout)["output_ids"]))

    def _generated(self, prompt: dict[str, Any], sampling: dict[str, Any], timeout: float) -> dict[str, Any]:
        body = {**prompt, "sampling_params": {"temperature": 0, **sampling}}
        status, answer = self.post("/generate", body, timeout)
        if status != 200:
            raise EngineFailed(f"/generate answered {status}: {answer}\n{self.tail()}")
        return dict(answer)

    def flush(self, timeout: float = 20.0) -> None:
        """Forget what was computed for earlier prompts. Refused while the last request is still being finished."""
        deadline = time.monotonic() + timeout
        while (answer := self.post("/flush_cache", {}))[0] != 200:
            if time.monotonic() > deadline:
                raise EngineFailed(f"/flush_cache answered {answer}\n{self.tail()}")
            time.sleep(0.05)

    def get(self, path: str, timeout: float = 30.0) -> tuple[int, Any]:
        """Status and decoded body of a GET."""
        return self._request(urllib.request.Request(self._url(path)), timeout)

    def post(self, path: str, body: object, timeout: float = 120.0) -> tuple[int, Any]:
        """Status and decoded body of a POST."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url(path), json.dumps(body).encode(), headers)
        return self._request(request, timeout)

    def family(self) -> list[psutil.Process]:
        """The live processes that this engine started: its descendants, and whatever shares its session."""
        leader = self.process.pid
        found = {process for process in psutil.process_iter() if _session(process.pid) == leader}
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {psutil.Process(leader), *psutil.Process(leader).children(recursive=True)}
        self._family |= found
        return [process for process in self._family if _alive(process)]

    def schedulers(self) -> list[psutil.Process]:
        """The processes that hold the weights, one a rank."""
        return [process for process in self.family() if "sglang::scheduler" in _title(process)]

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL the started process alone, as the kernel would, and reap it."""
        self.family()
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self, grace: float = 10.0) -> None:
        """End every process that this engine started: SIGTERM to the first, SIGKILL to what is left."""
        if self._process is None:
            return
        family = self.family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace)
        deadline = time.monotonic() + 20
        while family := self.family():
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # psutil compares start times first: never a stranger with a reused pid
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.2)
            if time.monotonic() > deadline:
                raise EngineFailed(f"could not end {family}")
        self._process.wait(timeout=5)

    def __enter__(self) -> Self:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.stop(grace=0)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            return self.get("/model_info", timeout=5)[0] == 200
        except OSError:
            return False

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @staticmethod
    def _request(request: urllib.request.Request, timeout: float) -> tuple[int, Any]:
        try:
            with _http.open(request, timeout=timeout) as response:
                return response.status, _decode(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decode(error.read())


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
