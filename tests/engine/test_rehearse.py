"""A rehearsal: one throw-away engine, on the agent's weights, that leaves kernels behind and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.engine import support
from tests.support.agent import Agent, eventually
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import NEWEST, engine_variables, environments
from weightcache.compiled import places

pytestmark = pytest.mark.timeout(600)

REHEARSE_SECONDS = 240.0
ARGUMENTS = (*support.ARGUMENTS, "--chunked-prefill-size", "64")
"""A chunk of the default size takes a CPU minutes."""


@dataclass(frozen=True, slots=True)
class Rehearsals:
    """``wcache rehearse`` beside one agent that holds the model, with caches that nobody else uses."""

    agent: Agent
    version: str
    environment: Mapping[str, str]

    def command(self, *options: str) -> list[str]:
        wcache = environments().script("wcache", self.version)
        return [str(wcache), "--config", str(self.agent.config), "--runtime-dir", str(self.agent.runtime_dir), *options]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("rehearse", *options),
            capture_output=True,
            text=True,
            timeout=REHEARSE_SECONDS,
            env=dict(self.environment),
            check=False,
        )

    def processes(self) -> list[str]:
        """Whatever a rehearsal started: wcache-launch and what is below it have the caches in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("WEIGHTCACHE_CACHE_DIR") == self.environment["WEIGHTCACHE_CACHE_DIR"]:
                    found.append(" ".join(process.cmdline())[:200])
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def rehearsals(checkpoint: Path, sglang_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsals]:
    home = tmp_path_factory.mktemp("home")
    environment = {**engine_variables(), **support.VARIABLES, "HOME": str(home)}
    environment |= {"WEIGHTCACHE_CACHE_DIR": str(home / "cache"), "WEIGHTCACHE_STATE_DIR": str(home / "state")}
    environment |= {"TMPDIR": str(home)}
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    try:
        with Agent(folder, version=sglang_version, model=checkpoint, arguments=ARGUMENTS) as agent:
            agent.load()
            yield Rehearsals(agent, sglang_version, environment)
    finally:
        shutil.rmtree(folder)


def test_a_rehearsal(rehearsals: Rehearsals) -> None:
    done = rehearsals.run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    # With these arguments, SGLang compiles nothing on a CPU.
    assert (result["outcome"], result["files"]) == ("nothing", 0)
    said = [line.removeprefix("rehearse: ") for line in done.stderr.splitlines()]
    assert any(line.startswith("rank 0: attached set") for line in said), said
    assert [line.partition(":")[0] for line in said[-3:]] == [
        "a short prompt",
        f"a prompt of {length(said)} tokens",
        "8 prompts at once",
    ]
    assert length(said) == 64 + 64
    assert Path(result["directory"], "stamp.json").is_file()
    assert rehearsals.processes() == []
    (resident,) = rehearsals.agent.status().sets
    assert resident.leases == ()

    began = time.monotonic()
    again = rehearsals.run("--once")
    assert (again.returncode, again.stderr) == (0, ""), again
    assert "nothing to do" in again.stdout
    assert time.monotonic() - began < 15
    listed = subprocess.run(
        rehearsals.command("caches"), env=dict(rehearsals.environment), capture_output=True, text=True
    )
    assert result["stamp"] in listed.stdout
    assert rehearsals.version in listed.stdout


def length(said: Sequence[str]) -> int:
    (line,) = [line for line in said if line.startswith("a prompt of ")]
    return int(line.split()[3])


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_killing_the_command_ends_its_engine(rehearsals: Rehearsals) -> None:
    command = subprocess.Popen(
        rehearsals.command("rehearse"),
        env=dict(rehearsals.environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        family = psutil.Process(command.pid).children

        def attached() -> bool:
            return bool(rehearsals.agent.status().sets[0].leases)

        eventually(attached, REHEARSE_SECONDS)
        started = family(recursive=True)
        assert any("sglang::scheduler" in " ".join(process.cmdline()) for process in started)
        command.kill()
        command.wait()
        _, alive = psutil.wait_procs(started, 15)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        eventually(lambda: not attached(), 5)
    finally:
        command.kill()
        command.wait()


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_without_weights_it_refuses(rehearsals: Rehearsals, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    try:
        with Agent(folder) as empty:
            alone = Rehearsals(empty, rehearsals.version, rehearsals.environment)
            done = alone.run("--", "--model-path", str(checkpoint), *CPU_ARGUMENTS)
            assert (done.returncode, done.stdout) == (1, "")
            assert "rank 0 is empty" in done.stderr
            assert "--from-disk" in done.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)
def test_inductor_writes_where_the_variables_say_and_finds_it_again(sglang_version: str, tmp_path: Path) -> None:
    """SGLang compiles nothing on this CPU with these arguments; torch.compile does."""
    directory = tmp_path / "stamp"
    home = tmp_path / "home"
    home.mkdir()
    environment = {**engine_variables(), "HOME": str(home), "TMPDIR": str(home)}
    environment |= places.variables(directory, environment)
    program = (
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "f = torch.compile(lambda x: torch.sin(x) + x * 2)\n"
        "x = torch.arange(64.0)\n"
        "assert torch.allclose(f(x), torch.sin(x) + x * 2)\n"
        "print(dict(counters['inductor']).get('fxgraph_cache_hit', 0))\n"
    )

    def compiled() -> set[Path]:
        return {path for path in directory.rglob("*") if path.is_file()}

    def compile_it() -> int:
        done = subprocess.run(
            [str(environments().engine(sglang_version)), "-c", program],
            env=environment, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    assert compile_it() == 0
    first = compiled()
    assert any(path.suffix == ".so" and path.is_relative_to(directory / "inductor") for path in first)
    assert not list(home.rglob("*.so"))
    assert compile_it() == 1
    assert {path.suffix for path in compiled() - first} <= {""}
