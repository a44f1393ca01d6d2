"""What the units promise whatever the programs are: stand-ins (standin.py) take the agent's and the loader's place."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import eventually
from tests.support.environments import REPOSITORY
from tests.systemd.machine import Inside, Machine

STANDIN: list[str | Path] = ["/usr/bin/python3", "-I", REPOSITORY / "tests" / "systemd" / "standin.py"]
SERVICE, SOCKET, TARGET = "weightcache@0.service", "weightcache@0.socket", "weightcache.target"
LOADERS = "weightcache-loader@*.service"
EXEC_START = "[Service]\nExecStart=\nExecStart={} {}\n"
PROGRAM = f'{STANDIN[0]} -I "{STANDIN[2]}"'
FILES = {
    "weightcache@.service": EXEC_START.format(PROGRAM, "agent %i"),
    "weightcache-loader@.service": EXEC_START.format(PROGRAM, "loader"),
}
RUN = "/run/weightcache"
SECONDS = 30.0


@pytest.fixture(scope="module")
def machine(systemd: str, stage: Path) -> Iterator[Machine]:
    """A machine whose agent and loader are stand-ins."""
    with Machine(systemd, stage, enable=[SOCKET], files=FILES, readable=[REPOSITORY]) as booted:
        yield booted


def connect(machine: Machine, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(SECONDS)
    try:
        sock.connect(str(machine.path(f"{RUN}/{name}")))
    except OSError:
        sock.close()
        raise
    return sock


def ask(machine: Machine, command: str = "report", name: str = "0.sock") -> dict[str, Any]:
    """The agent's report; starts the agent, as any client does."""
    with connect(machine, name) as sock:
        sock.send(command.encode())
        answer: dict[str, Any] = json.loads(sock.recv(65536))
        return answer


def ask_as(machine: Machine, user: str, name: str, command: str = "report") -> str:
    """What a client of ``user`` inside gets."""
    return machine.run(
        *STANDIN, "ask", f"{RUN}/{name}", command, user=user, check=False, timeout=SECONDS
    ).stdout.strip()


def state(machine: Machine, unit: str) -> str:
    return machine.show(unit, "ActiveState")["ActiveState"]


# The descriptor store


def kill_agent(machine: Machine) -> None:
    machine.kill(machine.main_pid(SERVICE))


RESTARTS: dict[str, Callable[[Machine], object]] = {
    "SIGKILL": kill_agent,
    "systemctl kill": lambda machine: machine.systemctl("kill", SERVICE),
    "restart": lambda machine: machine.systemctl("restart", SERVICE),
    "restart of the socket": lambda machine: machine.systemctl("restart", SOCKET),
    "restart of the target": lambda machine: machine.systemctl("restart", TARGET),
}
NOTHINGS: dict[str, Callable[[Machine], object]] = {
    "daemon-reload": lambda machine: machine.systemctl("daemon-reload"),
    "daemon-reexec": lambda machine: machine.systemctl("daemon-reexec"),
    "isolate": lambda machine: machine.systemctl("isolate", "multi-user.target"),
}


@pytest.mark.parametrize("event", RESTARTS)
def test_a_restarted_agent_gets_its_descriptors_back(machine: Machine, event: str) -> None:
    before = ask(machine)
    RESTARTS[event](machine)
    after = ask(machine)
    assert after["pid"] != before["pid"]
    assert after["pool"] == before["pool"]
    assert machine.stored(SERVICE) == 1


@pytest.mark.parametrize("event", NOTHINGS)
def test_the_agent_and_its_descriptors_stay(machine: Machine, event: str) -> None:
    before = ask(machine)
    NOTHINGS[event](machine)
    assert ask(machine) == before
    assert machine.stored(SERVICE) == 1
    kill_agent(machine)
    assert ask(machine)["pool"] == before["pool"]


@pytest.mark.parametrize("unit", [SERVICE, SOCKET, TARGET])
def test_stop_frees_the_descriptors(machine: Machine, unit: str) -> None:
    before = ask(machine)
    assert machine.stored(SERVICE) == 1
    machine.systemctl("stop", unit)
    assert machine.stored(SERVICE) == 0
    machine.systemctl("start", TARGET, SOCKET)
    assert ask(machine)["pool"] != before["pool"]


def test_thirty_crashes_in_a_row_lose_neither_socket_nor_descriptors(machine: Machine) -> None:
    before = ask(machine)
    socket_since = machine.show(SOCKET, "ActiveEnterTimestampMonotonic")
    restarts = int(machine.show(SERVICE, "NRestarts")["NRestarts"])
    machine.write_file(f"{RUN}/crashes", "30")
    machine.run("chown", "weightcache:", f"{RUN}/crashes")
    with machine.drop_in(SERVICE, "[Service]\nRestartSec=10ms\n"):
        kill_agent(machine)
        after = ask(machine)  # a client that comes meanwhile waits
    assert after["pool"] == before["pool"]
    assert int(machine.show(SERVICE, "NRestarts")["NRestarts"]) - restarts == 31
    assert machine.show(SOCKET, "ActiveEnterTimestampMonotonic") == socket_since
    assert machine.stored(SERVICE) == 1


def test_a_hung_agent_is_replaced(machine: Machine) -> None:
    with machine.drop_in(SERVICE, "[Service]\nWatchdogSec=1\n"):
        machine.systemctl("restart", SERVICE)
        before = ask(machine)
        machine.kill(before["pid"], signal.SIGSTOP)
        after = ask(machine)
    assert after["pid"] != before["pid"]
    assert after["pool"] == before["pool"]


def test_who_waits_in_the_queue_is_answered_by_the_next_agent(machine: Machine) -> None:
    before = ask(machine)
    machine.kill(before["pid"], signal.SIGSTOP)
    with connect(machine, "0.sock") as waiting:
        waiting.send(b"report")
        machine.kill(before["pid"])
        after = json.loads(waiting.recv(65536))
    assert after["pid"] != before["pid"]
    assert after["pool"] == before["pool"]


# Activation


def test_asking_for_the_status_starts_nothing_after_a_stop(machine: Machine) -> None:
    before = ask(machine)
    assert ask(machine, name="0.status.sock") == before
    machine.systemctl("stop", SERVICE)
    for _ in range(20):
        with pytest.raises(FileNotFoundError):
            connect(machine, "0.status.sock")
        time.sleep(0.01)
    assert [state(machine, unit) for unit in (SERVICE, SOCKET)] == ["inactive", "active"]
    assert ask(machine)["pid"] != before["pid"]


def test_boot_does_not_wait_for_a_warm_up(boot: Callable[..., Machine]) -> None:
    files = {**FILES, "/etc/weightcache/slow": "4"}
    machine = boot(enable=[SOCKET, "weightcache-warm@0.service"], files=files)
    name = "ActiveEnterTimestampMonotonic"

    def since(unit: str) -> float:
        return int(machine.show(unit, name)[name]) / 1e6

    eventually(lambda: state(machine, SERVICE) == "active", SECONDS)
    assert since(SERVICE) - since("multi-user.target") > 1.5
    assert ask(machine)["pid"] == machine.main_pid(SERVICE)


# Who may do what


def test_who_may_connect(machine: Machine) -> None:
    assert "pid" in ask_as(machine, "member", "0.sock")
    assert ask_as(machine, "stranger", "0.sock") == "EACCES"
    for user in ("member", "stranger", "weightcache-loader"):
        assert ask_as(machine, user, "loader.sock", "") == "EACCES"


def test_the_sandbox_lets_the_agent_work_and_nothing_else(machine: Machine) -> None:
    probes = json.loads(ask_as(machine, "member", "0.sock", "probe"))["probes"]
    assert int(probes.pop("client")) == int(machine.run("id", "--user", "member").stdout)
    assert int(probes.pop("journal")) > 0
    assert int(probes.pop("sealed memory")) & 0xF == 0xE
    assert probes.pop("code") in ("EPERM", "EACCES")
    assert probes == {
        "client's process": "/usr/bin/python3",
        "client's unit": "True",
        "lease": "opened",
        "not dumpable": "0",
        "publish socket": "given",
        "status file": "written",
        "home": "0",
        "other user's process": "EPERM",
        "etc": "EROFS",
        "var": "EROFS",
        "network": "EAFNOSUPPORT",
        "devices": "[]",
    }
    [entry] = [entry for entry in machine.journal(SERVICE) if entry.get("WEIGHTCACHE_PROBE") == "1"]
    assert entry["MESSAGE"] == "native line"


# Loaders


def hold(machine: Machine) -> tuple[Inside, dict[str, Any]]:
    """Ask for a loader as the agent does; what it reports, and the connection's holder."""
    pipe = subprocess.PIPE
    holder = machine.popen(
        [*STANDIN, "hold", f"{RUN}/loader.sock"], user="weightcache", stdin=pipe, stdout=pipe, text=True
    )
    assert holder.stdout is not None
    return holder, json.loads(holder.stdout.readline())


def nothing_left(machine: Machine) -> bool:
    units = machine.systemctl("list-units", "--all", "--no-legend", LOADERS)
    return not units and machine.run("pgrep", "--uid", "weightcache-loader", check=False).stdout == ""


def test_each_connection_starts_a_loader_of_its_own(machine: Machine) -> None:
    cache = "/var/cache/weightcache"
    first, one = hold(machine)
    second, other = hold(machine)
    with first, second:
        assert one["unit"] != other["unit"]
        assert one["unit"].startswith("weightcache-loader@")
        assert {key: one[key] for key in ("user", "groups", "directory", "cache", "etc", "code", "all of /proc")} == {
            "user": "weightcache-loader",
            "groups": ["weightcache", "weightcache-loader", "weightcache-publish"],
            "directory": cache,
            "cache": "1",
            "etc": "EROFS",
            "code": "mapped",
            "all of /proc": True,
        }
        assert "lo" in one["network"]
        assert {value.startswith(cache) for value in one["variables"].values()} == {True}
        for holder in (first, second):
            holder.communicate()  # which closes its input, and so ends it
        # The stand-in leaves a child that ignores SIGTERM.
        eventually(lambda: nothing_left(machine), 10.0, lambda: machine.run("ps", "axf").stdout)
    assert "a line that belongs in the journal" in machine.messages(one["unit"])


def test_a_failed_loader_leaves_no_unit(machine: Machine) -> None:
    holder, report = hold(machine)
    with holder:
        print("fail", file=holder.stdin, flush=True)
        eventually(lambda: nothing_left(machine), 10.0)
    assert any("status=9" in message for message in machine.messages(report["unit"]))
    assert machine.systemctl("is-system-running") == "running"


def test_the_other_side_sees_the_end_of_a_killed_loader(machine: Machine) -> None:
    with connect(machine, "loader.sock") as sock:
        report = json.loads(sock.recv(65536))
        machine.kill(report["pid"])
        assert sock.recv(65536) == b""
    eventually(lambda: nothing_left(machine), 10.0)


def test_the_agent_reaches_the_loader_from_its_sandbox(machine: Machine) -> None:
    assert ask(machine, "loader")["loader"]["user"] == "weightcache-loader"
    eventually(lambda: nothing_left(machine), 10.0)


def test_what_cannot_be_enforced_here_is_set_at_least(machine: Machine) -> None:
    agent = {"OOMPolicy": "continue", "OOMScoreAdjust": "-500", "LimitNOFILE": "65536", "DevicePolicy": "closed"}
    assert machine.show(SERVICE, *agent) == agent
    loader = {"OOMScoreAdjust": "500", "LimitMEMLOCK": "infinity", "DevicePolicy": "closed"}
    assert machine.show("weightcache-loader@x.service", *loader) == loader
    allowed = machine.show("weightcache-loader@x.service", "DeviceAllow")["DeviceAllow"]
    assert "char-nvidia* rw" in allowed
