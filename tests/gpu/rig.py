"""What the GPU tests start and measure: agents, engines through ``wcache-launch``, and memory as the driver sees it.

On a GPU machine everything runs under one interpreter that has SGLang, torch and weightcache. With
``WEIGHTCACHE_RIG=host`` the same story runs on the CPU with a small model: a dry run of the script, not of the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import sdnotify

from tests.support.engine import CPU_ARGUMENTS, Engine, end_with_parent
from tests.support.environments import SHIM
from weightcache import keeper as keeping, protocol, records
from weightcache.client import Conversation
from weightcache.launch.layout import all_gpus
from weightcache.paths import RankPaths
from weightcache.status import RankStatus

PROMPTS = ([5, 17, 99, 1234, 7], [42, 11, 300, 8], [100, 200, 300, 400, 500, 600])
TOKENS = 24
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """The kind of machine."""

    backend: str
    model: Path
    base: tuple[str, ...]
    fast: tuple[str, ...]
    """Options that shorten a start where graphs do not matter."""


def profile() -> Profile:
    """From the environment: WEIGHTCACHE_RIG (cuda or host), WEIGHTCACHE_MODEL (a checkpoint)."""
    model = Path(os.environ.get("WEIGHTCACHE_MODEL", ""))
    if os.environ.get("WEIGHTCACHE_RIG") == "host":
        return Profile("host", model, CPU_ARGUMENTS, ())
    base = (
        *("--attention-backend", "triton"),
        *("--sampling-backend", "pytorch"),
        *("--grammar-backend", "none"),
        *("--cuda-graph-max-bs-decode", "4"),
        *("--mem-fraction-static", "0.35"),
    )
    return Profile("cuda", model, base, ("--disable-prefill-cuda-graph",))


@dataclass(slots=True)
class Figures:
    """Numbers by name, in the order they were measured; written to $WEIGHTCACHE_FIGURES and printed at the end."""

    rows: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        self.rows[name] = value
        print(f"FIGURE {name}: {value}", flush=True)
        if path := os.environ.get("WEIGHTCACHE_FIGURES"):
            Path(path).write_text(json.dumps(self.rows, indent=1))


def device_used(gpu: int = 0) -> int:
    """Bytes in use on a GPU (all processes), or 0 without one."""
    if profile().backend == "host":
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used)


def process_used(gpu: int = 0) -> dict[int, int]:
    """A GPU's memory by process, in bytes."""
    if profile().backend == "host":
        return {}
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    return {p.pid: int(p.usedGpuMemory or 0) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def gpu_count() -> int:
    """GPUs of this machine."""
    return len(all_gpus()) if profile().backend == "cuda" else 0


def with_device_files() -> list[str]:
    """Who has a file of the driver open."""
    names = set()
    for process in psutil.process_iter(["pid", "name"]):
        with contextlib.suppress(OSError, psutil.Error):
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()).startswith("/dev/nvidia"):
                        names.add(f"{process.info['name']} ({process.pid})")
    return sorted(names)


def gpu_uuid(gpu: int = 0) -> str:
    """The UUID of a GPU, as nvidia-smi prints it."""
    return all_gpus()[gpu]


class PeakWatch:
    """The highest device use while a block runs, sampled every few milliseconds by a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.004):
            self.peak = max(self.peak, device_used())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


class Agent:
    """The real agent of one rank. Those of several ranks share a directory, whose configuration is written already."""

    def __init__(
        self,
        directory: Path,
        *,
        model: bool = False,
        policy: str = "",
        rank: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.config = directory / "weightcache.toml"
        self.rank = rank
        self.paths = RankPaths(directory, rank)
        self.log = directory / f"agent-{rank}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = variables() if environment is None else environment
        if environment is None:
            self._configure(model, policy)

    def _configure(self, model: bool, policy: str) -> None:
        rig, directory = profile(), self.directory
        arguments = ["--model-path", str(rig.model), *rig.base] if model else []
        gpu = f'gpu = "{gpu_uuid()}"\n' if rig.backend == "cuda" else ""
        command = json.dumps([sys.executable, "-m", "weightcache.loader"])
        text = f'[agent]\nruntime_dir = "{directory}"\n[loader]\ncommand = {command}\n'
        text += f"[model]\narguments = {json.dumps(arguments)}\n" if model else ""
        text += f'[memory]\nbackend = "{rig.backend}"\n{policy}[[rank]]\nrank = 0\n{gpu}'
        self.config.write_text(text)

    def start(self) -> Agent:
        """Under the keeper, which starts the agent again after its death."""
        # -S and explicit paths: the resident part is what a distribution's interpreter without site packages runs.
        vendored = self.directory / "vendored"
        if not vendored.exists():
            shutil.copytree(Path(sdnotify.__file__).parent, vendored / "sdnotify")
        paths = [str(package_parent()), str(vendored)]
        code = f"import sys; sys.path[:0] = {paths!r}; from weightcache.server.__main__ import main; sys.exit(main())"
        python = [os.environ.get("WEIGHTCACHE_AGENT_PYTHON", sys.executable), "-I", "-S"]
        keeper = [*python, keeping.__file__, "--listen", str(self.paths.public), "--"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*keeper, *python, "-c", code, "--rank", str(self.rank), "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        wait_for(lambda: self.paths.status.exists(), 20, "the agent's status socket")
        return self

    @property
    def pid(self) -> int:
        """The agent that runs now."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children()[0].pid

    @property
    def keeper(self) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self) -> dict[str, Any]:
        out = wcache(self, "status", "--json", check=False).stdout
        return next(dict(entry) for entry in json.loads(out)["ranks"] if entry["rank"] == self.rank)

    def report(self) -> RankStatus:
        """What it says itself, without a detour."""
        with Conversation(self.paths.status) as conversation:
            return conversation.request(protocol.Status(), protocol.RankReport).status

    def rescue(self) -> dict[str, Any]:
        """SIGKILL the agent from a process with a warm device, which attaches at once and checks the digests."""
        now = self.report()
        argv = [sys.executable, "-m", "tests.bench.synthetic", "rescue", "--backend", profile().backend]
        argv += ["--socket", str(self.paths.public), "--kill", str(self.pid)]
        argv += ["--fingerprint", json.dumps(records.to_plain(now.sets[0].fingerprint))]
        env = variables() | ({"CUDA_VISIBLE_DEVICES": now.gpu_uuid} if now.gpu_uuid else {})
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def stop(self) -> None:
        """End keeper and agent; nothing where it was never started."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=40)  # the keeper gives its agent 30 s

    def leases(self) -> list[int]:
        return [lease["pid"] for entry in self.status()["sets"] for lease in entry["leases"]]


def package_parent() -> Path:
    """The folder that holds the package under its import name."""
    import weightcache

    return Path(weightcache.__file__).parent.parent


def variables() -> dict[str, str]:
    """The environment of what the rig starts."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("WEIGHTCACHE_RUNTIME", "PYTEST_"))}
    paths = [str(SHIM)] if profile().backend == "host" else []
    found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    found |= {"PYTHONUNBUFFERED": "1", "SGLANG_DISABLE_TELEMETRY": "1"}
    return found


def wcache(agent: Agent, *arguments: str, check: bool = True, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run ``wcache`` against ``agent``."""
    argv = [sys.executable, "-m", "weightcache.cli", "--config", str(agent.config), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=check, timeout=timeout, env=variables())


def top(agent: Agent, *arguments: str) -> str:
    """What ``wcache-top`` prints about ``agent``."""
    code = "import sys; from weightcache.tui.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "--config", str(agent.config), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=variables(), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def engine(log: Path, *options: str, directory: Path | None = None, extra: Sequence[str] = ()) -> Engine:
    """An engine through ``wcache-launch`` with ``options`` of the launcher and ``extra`` options of SGLang."""
    # Tokens of different engines are compared: all of them have to capture the same graphs before they answer.
    command = [sys.executable, "-m", "weightcache.launch", "--wcache-without", "graphs", *options]
    if directory is not None:
        command += ["--wcache-runtime-dir", str(directory)]
    rig = profile()
    made = Engine(rig.model, log=log, command=command, base=rig.base, arguments=extra)
    made.environment = variables()
    return made


@dataclass(frozen=True, slots=True)
class Started:
    """How long a start took: seconds from the command to the first greedy token, and to the server's answer."""

    ready: float
    first_token: float


@contextlib.contextmanager
def serving(made: Engine, timeout: float = 400) -> Iterator[Started]:
    """Start ``made``, wait for its first token, stop it afterwards."""
    begin = time.monotonic()
    try:
        made.start().wait_ready(timeout)
        ready = time.monotonic() - begin
        made.tokens([5, 17, 99], 1)
        yield Started(round(ready, 2), round(time.monotonic() - begin, 2))
    except BaseException:
        print(made.tail(60), flush=True)
        raise
    finally:
        made.stop()


def answers(made: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Greedy tokens for the fixed prompts, each time from an empty prefix cache.

    A cached prefix makes a shorter prefill, another GEMM shape and so other low-order bits: in a model of random
    weights that is another token. Equal text needs equal shapes.
    """
    time.sleep(0.5)  # the first rank may be done while another one still has the last request, and then keeps its cache
    deadline = time.monotonic() + 20
    while made.post("/flush_cache", {})[0] != 200:  # refused while the last request is still being finished
        if time.monotonic() > deadline:
            raise AssertionError("the server does not flush its prefix cache")
        time.sleep(0.1)
    return [made.tokens(list(prompt), TOKENS) for prompt in prompts]


def pool_tokens(made: Engine) -> int:
    """Tokens that the KV pool holds."""
    for path in ("/server_info", "/get_server_info"):
        status, body = made.get(path)
        if status == 200:
            return int(body["max_total_num_tokens"])
    raise AssertionError("the server does not say how many tokens its pool holds")


def reserved_bytes(made: Engine) -> int:
    """Weight memory as SGLang measured it around the load ("mem usage=… GB"), in bytes."""
    found = re.findall(r"Load weight end.*mem usage=([0-9.]+) GB", made.text())
    return int(float(found[-1]) * 2**30) if found else 0


def milliseconds(made: Engine) -> dict[str, float]:
    """The steps of the attach, from the decision that the engine logs."""
    found = re.findall(r"weightcache: Decision\(.*?milliseconds=(\{[^}]*\})", made.text())
    return dict(json.loads(found[-1].replace("'", '"'))) if found else {}


def private_bytes(made: Engine) -> int:
    """What the engine copied for itself, from the decision that it logs."""
    found = re.findall(r"weightcache: Decision\(.*?private_bytes=(\d+)", made.text())
    return int(found[-1]) if found else 0


def launcher_line(made: Engine) -> str:
    """The launcher's sentence about rank 0."""
    return next((line for line in made.text().splitlines() if "rank 0:" in line), "")


def family_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


def wait_for(condition: Any, seconds: float, what: str) -> None:
    """Poll until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


def ended_late(process: subprocess.Popen[bytes], seconds: float, grace: float) -> bool:
    """Wait for its end; a process that takes longer is interrupted, so that it ends what it started. True if so.

    It has ``grace`` seconds for that.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return True
