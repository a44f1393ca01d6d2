"""The real loader and the real SGLang, on the CPU and in host memory: SIGKILL of the agent once at every stage.

Under one version of systemd, the one whose Python the environments were made for. The matrix with all repetitions uses
a loader without torch (test_kill.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.engine.support import samples
from tests.support import pagecache
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import REPOSITORY, SHIM, environments, folder
from tests.systemd.conftest import SOCKETS
from tests.systemd.machine import Machine, missing
from tests.systemd.rank import CONFIG, Rank, eventually, gated, prepare
from weightcache.checkpoint import weight_files
from weightcache.errors import WeightcacheError

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]

CLIENT = REPOSITORY / "tests" / "systemd" / "engine_client.py"
LOAD_SECONDS = 180.0


@pytest.fixture(scope="module")
def systemd() -> str:
    """This machine's own root, in which the environments work."""
    if reason := missing("252"):
        pytest.skip(reason)
    return "252"


@pytest.fixture(scope="module")
def machine(systemd: str, stage: Path, smollm2: Path) -> Iterator[Machine]:
    command = json.dumps([str(environments().engine()), "-m", "weightcache.loader"])
    text = f"""\
[loader]
command = {command}
environment = {{ PYTHONPATH = "{SHIM}", SGLANG_DISABLE_TELEMETRY = "1" }}
[model]
arguments = {json.dumps(["--model-path", str(smollm2), *CPU_ARGUMENTS])}
[memory]
backend = "host"
[[rank]]
rank = 0
"""
    files = {CONFIG: text, "weightcache@.service": gated()}
    with Machine(systemd, stage, enable=SOCKETS, files=files, readable=[REPOSITORY, folder()]) as booted:
        prepare(booted)
        yield booted


@pytest.fixture
def rank(machine: Machine, trusting: None) -> Iterator[Rank]:
    found = Rank(machine)
    with found.inside_agent():
        yield found
        found.open_all()


class Engine:
    """An engine inside (engine_client.py), run by a member of the group."""

    def __init__(self, machine: Machine, model: Path, name: str) -> None:
        self.machine = machine
        self.log = f"/tmp/{name}.log"
        command: list[str | Path] = ["env", "HOME=/tmp", f"WEIGHTCACHE_ENVS={folder()}"]
        command += [environments().engine(), CLIENT, model, self.log]
        self._process = machine.popen(command, user="member", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._read()

    def ask(self) -> dict[str, Any]:
        """Its greedy text now."""
        print(file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended\n{self.text()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def text(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.machine.path(self.log).read_text(errors="replace")
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def phase(rank: Rank) -> str:
    with contextlib.suppress(WeightcacheError):
        if progress := rank.status().progress:
            return progress.phase
    return ""


def await_phase(rank: Rank, wanted: tuple[str, ...]) -> str:
    """Wait for one of these phases of a load."""
    for _ in range(int(LOAD_SECONDS / 20) + 1):
        with contextlib.suppress(AssertionError):
            return eventually(lambda: (found := phase(rank)) in wanted and found)  # type: ignore[return-value]
    raise AssertionError(f"never in {wanted}: {rank.show()}\n{rank.text()}")


def await_gate(rank: Rank, name: str) -> None:
    for _ in range(int(LOAD_SECONDS / 20)):
        with contextlib.suppress(AssertionError):
            rank.reached(name)
            return
    raise AssertionError(f"nobody at {name}: {rank.show()}\n{rank.text()}")


def test_every_stage_once(machine: Machine, rank: Rank, smollm2: Path) -> None:
    rank.begin()
    # Before the load, and in its middle: the half-made set is gone, and the next agent loads again.
    for stage in (("importing",), ("loading", "packing", "exporting", "digesting", "publishing")):
        await_phase(rank, stage)
        assert rank.stored == 1
        rank.kill()
        rank.mark()
        eventually(lambda: rank.count("load-began") == (1,), rank.text)
    # A part is in the store.
    rank.gate("storing")
    await_gate(rank, "storing")
    assert rank.stored == 2
    rank.kill()
    rank.mark()
    (rank.gates / "storing").unlink()
    # All is in the store and the loader does not know: from here on nothing is loaded again.
    rank.gate("stored")
    await_gate(rank, "stored")
    assert rank.count("load-began", "set-published") == (1, 0)
    rank.mark()
    killed = rank.kill()
    (rank.gates / "stored").unlink()
    rank.successor(killed)
    assert rank.count("set-adopted", "load-began") == (1, 0)
    status = rank.status()
    assert (status.state, status.kept) == ("ready", "store")
    [kept] = rank.ids()
    eventually(lambda: rank.count("verified") == (1,), rank.text)

    with Engine(machine, smollm2, "first") as first:
        assert any("attached set" in line for line in first.first["said"]), first.first
        assert "Paris" in first.first["text"]
        # While serving.
        rank.killed()
        assert rank.ids() == [kept]
        assert first.ask()["text"] == first.first["text"]
        eventually(lambda: [len(held.leases) for held in rank.status().sets] == [1], rank.status)
        # During the adoption, before and after the store has confirmed it.
        for gate in ("adopting", "adopted"):
            rank.gate(gate)
            rank.kill()
            rank.reached(gate)
            killed = rank.kill()
            (rank.gates / gate).unlink()
            rank.successor(killed)
            assert rank.ids() == [kept]
        assert first.ask()["text"] == first.first["text"]
        weights = weight_files(smollm2)
        pagecache.drop(weights)
        with Engine(machine, smollm2, "second") as second:
            assert second.first["text"] == first.first["text"]
            assert any(f"attached set {kept[:8]}" in line for line in second.first["said"]), second.first
        assert pagecache.resident(weights) <= sum(map(samples, weights))
    assert rank.count("load-began") == (0,)
    assert rank.restarts >= 7
