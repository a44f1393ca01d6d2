"""Real engines in both slots, through the units: who dies is replaced, and no connection is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import REPOSITORY, SHIM, environments, folder
from tests.systemd.conftest import SOCKETS
from tests.systemd.machine import Machine, missing
from tests.systemd.rank import CONFIG, eventually, prepare
from tests.systemd.test_standby import HTTP, PORT, SERVICES, clients, roles, stand

pytestmark = [pytest.mark.timeout(900), pytest.mark.engine]

START_SECONDS = 240.0
PYTHON = str(environments().root / "engine-0.5.23" / "bin" / "python")


@pytest.fixture(scope="module")
def machine(stage: Path, tiny_model: Path) -> Iterator[Machine]:
    """This machine's own root, in which the environments work, with the weights held and both slots set up."""
    if reason := missing("252"):
        pytest.skip(reason)
    arguments = ["--model-path", str(tiny_model), *CPU_ARGUMENTS]
    config = f"""\
[loader]
command = {json.dumps([PYTHON, "-m", "weightcache.loader"])}
environment = {{ PYTHONPATH = "{SHIM}", SGLANG_DISABLE_TELEMETRY = "1" }}
[model]
arguments = {json.dumps(arguments)}
[memory]
backend = "host"
[[rank]]
rank = 0
"""
    engine = f"""\
[engine]
arguments = {json.dumps([*arguments, "--sleep-on-idle", "--port", str(PORT)])}
python = "{PYTHON}"
environment = {{ PYTHONPATH = "{SHIM}", SGLANG_DISABLE_TELEMETRY = "1", OMP_NUM_THREADS = "1" }}
[standby]
drain_seconds = 5
"""
    files = {CONFIG: config, "/etc/weightcache/engines/e.toml": engine}
    with Machine("252", stage, enable=SOCKETS, files=files, readable=[REPOSITORY, folder()]) as booted:
        prepare(booted)
        booted.systemctl("start", "weightcache@0.service", timeout=START_SECONDS)
        booted.run("wcache", "engines", "setup", "e")
        booted.systemctl("daemon-reload")
        booted.systemctl("start", HTTP, *SERVICES.values(), timeout=START_SECONDS)
        yield booted


def both(machine: Machine) -> tuple[str, str]:
    """As stand(), with the patience that a start takes."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return stand(machine)
        except AssertionError:
            said = [line for service in SERVICES.values() for line in machine.messages(service)[-5:]]
            assert time.monotonic() < deadline, "\n".join(said)


def main_of(machine: Machine, slot: str) -> int:
    """The engine's main process."""
    [engine] = json.loads(machine.run("wcache", "engines", "--json", check=False).stdout)["engines"]
    status = next(each["status"] for each in engine["slots"] if each["slot"] == slot)
    return int(status["main"]["pid"])


@pytest.mark.parametrize(
    "whom", [main_of, lambda machine, slot: machine.main_pid(SERVICES[slot])], ids=["main", "unit"]
)
def test_a_killed_engine_is_replaced_under_load(machine: Machine, whom: Callable[[Machine, str], int]) -> None:
    """Its main process, and its launcher, which systemd kills the rest for."""
    active, standby = both(machine)
    with clients(machine, "ask") as seen:
        machine.kill(whom(machine, active))
        eventually(lambda: roles(machine)[standby] == "active", lambda: machine.messages(SERVICES[standby])[-20:])
    assert both(machine) == (standby, active)
    assert seen.pop("refused", 0) == 0
    assert seen.pop("cut", 0) <= 1, "the request that the killed engine had begun"
    assert seen.pop("longest") < 20
    assert len(seen) == 1, "always the same words"


def test_promote_park_and_wake_under_load(machine: Machine) -> None:
    active, standby = both(machine)
    with clients(machine, "ask") as seen:
        said = machine.run("wcache", "promote", "e", user="member").stdout
        assert said.startswith(f"e-{standby} is active after ")
        assert both(machine) == (standby, active)
        machine.run("wcache", "park", "e", user="member")
        assert sorted(roles(machine).values()) == ["parked", "parked"]
        machine.run("wcache", "wake", "e", user="member")
        both(machine)
    assert seen.pop("refused", 0) == 0
    seen.pop("longest")
    assert len(seen) == 1, "who retires answers first, and always the same words"
