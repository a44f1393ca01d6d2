"""Two slots behind one socket: what the units do when engines die, hang and stop, whatever the engine is."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import REPOSITORY
from tests.systemd.machine import Machine
from tests.systemd.rank import eventually
from tests.systemd.test_exporter import ASK

STANDIN = REPOSITORY / "tests" / "systemd" / "standin_engine.py"
PORT = 30000
FILE = f'[engine]\narguments = ["--model-path", "/models/m", "--port", "{PORT}"]\n'
UNIT = f"""\
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -B {STANDIN} slot %i
WatchdogSec=4
"""
HTTP = "weightcache-http@e.socket"
SERVICES = {slot: f"weightcache-engine@e-{slot}.service" for slot in "ab"}
RUN = "/run/weightcache/engines"


@pytest.fixture(scope="module")
def machine(systemd: str, stage: Path) -> Iterator[Machine]:
    """A machine that has booted with both slots of an engine, set up as an operator does it."""
    files = {"/etc/weightcache/engines/e.toml": FILE, "weightcache-engine@.service": UNIT}
    with Machine(systemd, stage, files=files, readable=[REPOSITORY]) as booted:
        booted.run("wcache", "engines", "setup", "e")
        booted.systemctl("daemon-reload")
        booted.systemctl("enable", HTTP, *SERVICES.values())
        booted.reboot()
        yield booted


def roles(machine: Machine) -> dict[str, str]:
    """The slots' roles, as a member of the group sees them."""
    shown = machine.run("wcache", "engines", "--json", user="member", check=False).stdout
    [engine] = json.loads(shown)["engines"]
    return {slot["slot"]: slot["role"] for slot in engine["slots"]}


def stand(machine: Machine) -> tuple[str, str]:
    """Which slot is active, and which one stands by, as soon as both are there."""
    eventually(lambda: sorted(roles(machine).values()) == ["active", "standby"], lambda: roles(machine))
    active, standby = sorted("ab", key=roles(machine).__getitem__)
    return active, standby


def await_active(machine: Machine, slot: str) -> None:
    eventually(lambda: roles(machine)[slot] == "active", lambda: roles(machine))


def scrape(machine: Machine) -> str:
    """What the exporter's unit says of engines."""
    text = machine.run("/usr/bin/python3", "-c", ASK, "/metrics", check=False).stdout
    return "\n".join(line for line in text.splitlines() if line.startswith("weightcache_engine_"))


def told(machine: Machine, slot: str, role: str) -> bool:
    """Whether the metrics say that the slot has the role."""
    return f'weightcache_engine_role{{engine="e",role="{role}",slot="{slot}"}} 1.0' in scrape(machine)


@contextlib.contextmanager
def clients(machine: Machine, what: str = "client") -> Iterator[dict[str, float]]:
    """A client that connects all the time; what it saw is there after the block."""
    command = ["/usr/bin/python3", "-B", str(STANDIN), what, str(PORT)]
    pipe = subprocess.PIPE
    seen: dict[str, float] = {}
    with machine.popen(command, stdin=pipe, stdout=pipe, text=True) as client:
        try:
            yield seen
            seen |= json.loads(client.communicate(timeout=60)[0])
        finally:
            client.kill()


def test_both_slots_are_up_after_a_boot_and_one_is_active(machine: Machine) -> None:
    stand(machine)
    assert machine.systemctl("is-system-running") == "running"
    assert machine.show(HTTP, "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
    shown = machine.run("stat", "--format=%U %G %a %n", RUN, f"{RUN}/e.lock", f"{RUN}/e-a.json").stdout.splitlines()
    assert shown == [
        f"weightcache weightcache 2771 {RUN}",
        f"weightcache-engine weightcache 660 {RUN}/e.lock",
        f"weightcache-engine weightcache 644 {RUN}/e-a.json",
    ]


def test_who_is_in_no_group_sees_the_slots_and_may_do_nothing(machine: Machine) -> None:
    stand(machine)
    shown = machine.run("wcache", "engines", user="stranger")
    assert [line.split()[2] for line in shown.stdout.splitlines()[1:]] == [roles(machine)[slot] for slot in "ab"]
    for command in (f"ls {RUN}", f"cat {RUN}/e.lock", f"touch {RUN}/e.parked"):
        assert machine.run("sh", "-c", command, user="stranger", check=False).returncode != 0, command


def test_the_exporter_tells_the_roles(machine: Machine) -> None:
    active, standby = stand(machine)
    machine.systemctl("start", "weightcache-exporter.service")
    try:
        eventually(
            lambda: told(machine, active, "active") and told(machine, standby, "standby"), lambda: scrape(machine)
        )
        machine.systemctl("kill", "--signal=SIGKILL", SERVICES[active])
        eventually(lambda: told(machine, standby, "active"), lambda: scrape(machine))
    finally:
        machine.systemctl("stop", "weightcache-exporter.service")


def test_killed_engines_come_back_as_standbys_and_no_connection_is_refused(machine: Machine) -> None:
    first, second = stand(machine)
    with clients(machine) as seen:
        for _ in range(2):
            active, standby = stand(machine)
            pid = machine.main_pid(SERVICES[active])
            machine.kill(pid)
            await_active(machine, standby)
            assert stand(machine) == (standby, active)
            assert machine.main_pid(SERVICES[active]) not in (0, pid)
    assert stand(machine) == (first, second)
    assert seen.get("refused", 0) == 0
    assert seen.get("cut", 0) <= 2, "only requests that the killed engine had begun"
    assert seen["a"] > 0
    assert seen["b"] > 0


def test_stopped_slots_are_not_started_by_clients(machine: Machine) -> None:
    active, standby = stand(machine)
    with clients(machine) as seen:
        machine.systemctl("stop", SERVICES[active])
        eventually(lambda: roles(machine) == {active: "down", standby: "active"})
        before = machine.main_pid(SERVICES[standby])
        machine.systemctl("restart", SERVICES[standby])
        await_active(machine, standby)
        assert machine.main_pid(SERVICES[standby]) != before
    assert seen.get("refused", 0) == 0
    assert machine.show(SERVICES[active], "ActiveState")["ActiveState"] == "inactive"
    machine.systemctl("start", SERVICES[active])
    assert stand(machine) == (standby, active)


def test_an_engine_that_hangs_is_killed_and_replaced(machine: Machine) -> None:
    active, standby = stand(machine)
    since = machine.cursor()
    with clients(machine) as seen:
        machine.kill(machine.main_pid(SERVICES[active]), signal.SIGSTOP)
        await_active(machine, standby)
    assert stand(machine) == (standby, active)
    assert seen.get("refused", 0) == 0
    assert f"{SERVICES[active]}: Failed with result 'watchdog'." in machine.messages(SERVICES[active], since)


def test_engines_that_keep_failing_close_no_port(machine: Machine) -> None:
    """With a client in the queue, each end of an engine is one more activation of the socket."""
    stand(machine)
    fails = "[Service]\nExecStart=\nExecStart=/bin/false\nRestartSec=10ms\n"
    with clients(machine) as seen:
        with machine.drop_in(SERVICES["a"], fails), machine.drop_in(SERVICES["b"], fails):
            for service in SERVICES.values():
                machine.kill(machine.main_pid(service))
            eventually(lambda: int(machine.show(SERVICES["a"], "NRestarts")["NRestarts"]) > 40)
        assert machine.show(HTTP, "ActiveState", "Result") == {"ActiveState": "active", "Result": "success"}
        stand(machine)
    assert seen.get("refused", 0) == 0


def test_the_units_are_as_systemd_wants_them(machine: Machine) -> None:
    done = machine.run("systemd-analyze", "verify", HTTP, *SERVICES.values())
    assert (done.stdout, done.stderr) == ("", "")
