"""GPU memory in the hands of a real systemd: what outlives the agent, what frees it. No SGLang is needed.

    tests/gpu/run.sh systemd ROOT.tar.xz      ROOT: a distribution root with systemd and the staged tree (root.sh)

The machine need not run systemd itself: boot.sh starts one in namespaces of its own. Publishers and readers run outside
and connect to the sockets inside, as engines in containers do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench import synthetic
from tests.gpu import rig
from tests.gpu.rig import MIB, Figures

ROOT = os.environ.get("WEIGHTCACHE_ROOT", "")
GIB = float(os.environ.get("WEIGHTCACHE_GIB", "40"))
SERVICE, SOCKET = "weightcache@0.service", "weightcache@0.socket"
pytestmark = pytest.mark.skipif(not ROOT, reason="needs WEIGHTCACHE_ROOT, a distribution root with systemd")

CHILD = (
    "import sys; from weightcache import client; uid = int(sys.argv.pop(1)); client.trusted_uids = lambda: {0, uid}; "
    "from tests.bench.synthetic import main; main()"
)
"""The user of the agent exists inside only."""


class Inside:
    """The system that boot.sh started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        rig.wait_for(lambda: psutil.Process(process.pid).children(), 20, "systemd")
        self.init = psutil.Process(process.pid).children()[0].pid

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        argv = ["nsenter", f"--target={self.init}", "--all", "--", *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "--property", name, SERVICE)

    @property
    def socket(self) -> Path:
        return Path(f"/proc/{self.init}/root/run/weightcache/0.sock")

    @property
    def agent(self) -> int:
        """The agent's process number outside."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(p.pid for p in family if "weightcache/agent" in " ".join(p.cmdline()))

    @property
    def user(self) -> int:
        passwd = (Path(ROOT) / "etc/passwd").read_text().splitlines()
        return next(int(line.split(":")[2]) for line in passwd if line.startswith("weightcache:"))

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.run("wcache", "status", "--json", check=False))["ranks"][0])

    def child(self, verb: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", CHILD, str(self.user), verb, "--backend", rig.profile().backend]
        argv += ["--socket", str(self.socket), *arguments]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=synthetic.REPOSITORY, env=rig.variables())

    def rescue(self, kill: bool = True) -> dict[str, Any]:
        """Attach, with intact bytes; by default right after a SIGKILL of the agent."""
        extra = ["--kill", str(self.agent)] if kill else []
        with self.child("rescue", *extra) as process:
            figures = synthetic.first_line(process)
        assert figures["intact"], figures
        return figures


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures()


@pytest.fixture(scope="module")
def baseline() -> int:
    return rig.device_used()


@pytest.fixture(scope="module")
def inside(baseline: int) -> Iterator[Inside]:
    gpu = f'gpu = "{rig.gpu_uuid()}"\n' if rig.profile().backend == "cuda" else ""
    text = f'[memory]\nbackend = "{rig.profile().backend}"\n[[rank]]\nrank = 0\n{gpu}'
    (Path(ROOT) / "etc/weightcache/weightcache.toml").write_text(text)
    boot = Path(__file__).with_name("boot.sh")
    process = subprocess.Popen([str(boot), ROOT], start_new_session=True)
    try:
        system = Inside(process)
        rig.wait_for(lambda: system.run("systemctl", "is-active", "multi-user.target", check=False) == "active", 30, "")
        system.run("systemctl", "start", SOCKET)
        yield system
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@pytest.fixture(scope="module")
def set_id(inside: Inside, figures: Figures) -> str:
    """A set that a process published that is dead now."""
    with inside.child("donate", "--gib", str(GIB), "--linger") as donor:
        made = synthetic.first_line(donor)
        donor.kill()
    figures.note("systemd: version", inside.run("systemctl", "--version").splitlines()[0])
    figures.note("systemd: GiB published by a process that was killed", GIB)
    return str(made["set_id"])


def held(inside: Inside) -> int:
    return int(inside.status()["sets"][0]["bytes"])


def test_only_systemd_and_the_agent_hold_the_memory(
    inside: Inside, set_id: str, figures: Figures, baseline: int
) -> None:
    rig.wait_for(lambda: not rig.process_used(), 30, "the publisher's context to be gone")
    status = inside.status()
    assert status["kept"] == "store"
    assert [s["id"] for s in status["sets"]] == [set_id]
    arenas = status["sets"][0]["arenas"]
    assert int(inside.show("NFileDescriptorStore")) == arenas + 3  # manifest, record, canary
    figures.note("systemd: arenas", arenas)
    figures.note("systemd: who has files of the driver open", rig.with_device_files())
    persistenced = any(process.name() == "nvidia-persistenced" for process in psutil.process_iter())
    figures.note("systemd: nvidia-persistenced runs", persistenced)
    if rig.profile().backend == "cuda":
        beside = (rig.device_used() - baseline - held(inside)) / MIB
        figures.note("systemd: device memory beside the arenas, MiB", round(beside, 1))
        assert abs(beside) <= 32


def test_sigkill_of_the_agent(inside: Inside, set_id: str, figures: Figures) -> None:
    used = rig.device_used()
    times = []
    for _ in range(5):
        found = inside.rescue()
        assert found["set_id"] == set_id
        times.append(found["answered_ms"])
    figures.note("systemd: SIGKILL of the agent to tensors bound again, ms", times)
    assert min(times) < 1000
    assert int(inside.show("NRestarts")) >= 5
    if rig.profile().backend == "cuda":
        rig.wait_for(lambda: abs(rig.device_used() - used) < 16 * MIB, 20, "device memory to be what it was")


def test_both_gone_but_systemd(inside: Inside, set_id: str, figures: Figures) -> None:
    """Between two agents, the first process of the system is the only one that holds the memory."""
    drop_in = Path(f"/proc/{inside.init}/root/run/systemd/system/{SERVICE}.d")
    drop_in.mkdir(parents=True, exist_ok=True)
    (drop_in / "slow.conf").write_text("[Service]\nRestartSec=3s\n")
    inside.run("systemctl", "daemon-reload")
    used = rig.device_used()
    os.kill(inside.agent, signal.SIGKILL)
    time.sleep(1.5)
    assert inside.show("MainPID") == "0"
    figures.note("systemd: alone, who has files of the driver open", rig.with_device_files())
    assert abs(rig.device_used() - used) < 16 * MIB
    assert inside.rescue(kill=False)["set_id"] == set_id
    (drop_in / "slow.conf").unlink()
    inside.run("systemctl", "daemon-reload")


@pytest.mark.parametrize("what", ["restart", "daemon-reload", "daemon-reexec"])
def test_kept_through(inside: Inside, set_id: str, what: str) -> None:
    inside.run("systemctl", what, *([SERVICE] if what == "restart" else []))
    found = inside.rescue(kill=what != "restart")
    assert found["set_id"] == set_id


def test_drain_gives_the_memory_back_while_the_unit_runs(
    inside: Inside, set_id: str, figures: Figures, baseline: int
) -> None:
    started = time.monotonic()
    inside.run("wcache", "drain", "--wait", "20")
    rig.wait_for(lambda: rig.device_used() - baseline < 32 * MIB, 30, "the memory to be free")
    figures.note("systemd: drain to memory free, s", round(time.monotonic() - started, 2))
    assert int(inside.show("NFileDescriptorStore")) == 1  # the canary
    assert inside.show("ActiveState") == "active"
    figures.note("systemd: drained, who has files of the driver open", rig.with_device_files())
    inside.run("wcache", "resume")


def test_stop_frees(inside: Inside, figures: Figures, baseline: int) -> None:
    with inside.child("donate", "--gib", str(GIB)) as donor:
        synthetic.first_line(donor)
    rig.wait_for(lambda: not rig.process_used(), 30, "the publisher to be gone")
    started = time.monotonic()
    inside.run("systemctl", "stop", SERVICE)
    figures.note("systemd: systemctl stop returned after, s", round(time.monotonic() - started, 2))
    rig.wait_for(lambda: rig.device_used() - baseline < 32 * MIB, 30, "the memory to be free")
    figures.note("systemd: stop to memory free, s", round(time.monotonic() - started, 2))
    assert int(inside.show("NFileDescriptorStore")) == 0
