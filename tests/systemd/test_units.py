"""The unit files themselves, and what a boot makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.environments import REPOSITORY
from tests.systemd.machine import Machine

UNITS = sorted(
    f"/usr/lib/systemd/system/{path.name}"
    for path in (REPOSITORY / "agent" / "units").iterdir()
    if path.suffix in (".service", ".socket", ".target") and path.name != "weightcache-http@.socket"
)
"""Without weightcache-http@.socket, which listens nowhere before an engine is set up (test_standby.py)."""
SOCKETS = ("weightcache@0.socket", "weightcache-loader.socket")


def owner_and_mode(machine: Machine, path: str) -> str:
    return machine.run("stat", "--format=%U %G %a %F", path).stdout.strip()


def exists(machine: Machine, path: str) -> bool:
    return machine.run("test", "-e", path, check=False).returncode == 0


def states(machine: Machine, *units: str) -> list[str]:
    return [machine.show(unit, "ActiveState")["ActiveState"] for unit in units]


def enabled(machine: Machine, unit: str) -> str:
    return machine.systemctl("is-enabled", unit, check=False)


def test_the_machine_runs_the_version_that_it_claims(machine: Machine) -> None:
    assert machine.systemctl("--version").startswith(f"systemd {machine.version} ")


def test_boot_with_an_enabled_rank_leaves_nothing_failed(machine: Machine) -> None:
    assert machine.systemctl("is-system-running") == "running"
    assert machine.systemctl("list-units", "--failed", "--no-legend") == ""
    assert states(machine, "weightcache.target", *SOCKETS) == ["active"] * 3
    assert states(machine, "weightcache@0.service") == ["inactive"]


def test_verify_has_nothing_to_say(machine: Machine) -> None:
    done = machine.run("systemd-analyze", "verify", *UNITS)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("unit", "most"),
    [("weightcache@.service", 1.5), ("weightcache-loader@.service", 3.0), ("weightcache-exporter.service", 1.8)],
)
def test_exposure(machine: Machine, unit: str, most: float) -> None:
    path = f"/usr/lib/systemd/system/{unit}"
    done = machine.run(
        "systemd-analyze", "security", "--offline=yes", f"--threshold={most * 10:.0f}", path, check=False
    )
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert done.returncode == 0, f"{found[1]} is more than {most}"


def test_users_and_groups(machine: Machine) -> None:
    def groups(user: str) -> set[str]:
        return set(machine.run("id", "--name", "--groups", user).stdout.split())

    assert groups("weightcache") == {"weightcache", "weightcache-publish"}
    assert groups("weightcache-loader") == {"weightcache-loader", "weightcache", "weightcache-publish"}
    assert groups("weightcache-engine") == {"weightcache-engine", "weightcache"}
    assert groups("weightcache-exporter") == {"weightcache-exporter"}
    for user in ("weightcache", "weightcache-loader", "weightcache-engine", "weightcache-exporter"):
        assert machine.run("getent", "passwd", user).stdout.strip().endswith("/nologin")


def test_directory_and_sockets(machine: Machine) -> None:
    assert owner_and_mode(machine, "/run/weightcache") == "weightcache weightcache 755 directory"
    assert owner_and_mode(machine, "/run/weightcache/engines") == "weightcache weightcache 2771 directory"
    assert owner_and_mode(machine, "/run/weightcache/0.sock") == "root weightcache 660 socket"
    assert owner_and_mode(machine, "/run/weightcache/loader.sock") == "weightcache weightcache 600 socket"


def test_presets_leave_the_ranks_to_the_operator(machine: Machine) -> None:
    assert enabled(machine, "weightcache.target") == "enabled"
    assert enabled(machine, "weightcache-loader.socket") == "enabled"
    assert enabled(machine, "weightcache@.service") == "static"
    assert enabled(machine, "weightcache-devices.service") == "static"
    names = ("weightcache@7.socket", "weightcache-warm@7.service", "weightcache-engine@e-a.service")
    for unit in (*names, "weightcache-exporter.service", "weightcache-rehearse.service"):
        assert enabled(machine, unit) == "disabled"
        machine.systemctl("enable", unit)
        assert enabled(machine, unit) == "enabled"
        machine.systemctl("preset", unit)
        assert enabled(machine, unit) == "disabled"


def test_a_rehearsal_is_told_whose_kernels_it_compiles(machine: Machine) -> None:
    """Without a drop-in it does not start, and keeps nothing else from starting."""
    machine.systemctl("start", "weightcache-rehearse.service", check=False)
    shown = machine.show("weightcache-rehearse.service", "ActiveState", "AssertResult")
    assert shown == {"ActiveState": "inactive", "AssertResult": "no"}


@pytest.mark.parametrize("place", ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system"])
def test_a_rehearsal_is_told_so_wherever_drop_ins_are(machine: Machine, place: str) -> None:
    folder, name = f"{place}/weightcache-rehearse.service.d", "weightcache-rehearse.service"
    text = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=\nExecStart=/usr/bin/true\n"
    machine.run("mkdir", folder)
    try:
        machine.run("sh", "-c", f"printf '{text}' >{folder}/mine.conf")
        machine.systemctl("daemon-reload")
        machine.systemctl("start", name)
        shown = machine.show(name, "ActiveState", "AssertResult")
        assert shown == {"ActiveState": "active", "AssertResult": "yes"}
    finally:
        machine.systemctl("stop", name)
        machine.run("rm", "-r", folder)
        machine.systemctl("daemon-reload")


def test_a_rank_is_enabled_and_disabled(machine: Machine) -> None:
    machine.systemctl("enable", "--now", "weightcache@1.socket")
    assert owner_and_mode(machine, "/run/weightcache/1.sock") == "root weightcache 660 socket"
    machine.systemctl("disable", "--now", "weightcache@1.socket")
    assert not exists(machine, "/run/weightcache/1.sock")
    assert exists(machine, "/run/weightcache/0.sock")


def test_the_target_is_all_ranks(machine: Machine) -> None:
    machine.systemctl("stop", "weightcache.target")
    assert states(machine, *SOCKETS) == ["inactive"] * 2
    assert not exists(machine, "/run/weightcache/0.sock")
    assert not exists(machine, "/run/weightcache/loader.sock")
    machine.systemctl("start", "weightcache.target")
    assert states(machine, *SOCKETS) == ["active"] * 2


def test_no_rank_is_enabled_by_installing(boot: Callable[..., Machine]) -> None:
    machine = boot()
    assert machine.systemctl("is-system-running") == "running"
    found = machine.run("sh", "-c", "echo /run/weightcache/*").stdout.split()
    assert found == ["/run/weightcache/engines", "/run/weightcache/loader.sock"]


def test_an_enabled_rank_comes_back_after_a_reboot(boot: Callable[..., Machine]) -> None:
    machine = boot()
    machine.systemctl("enable", "weightcache@3.socket")
    machine.reboot()
    assert machine.systemctl("is-system-running") == "running"
    assert owner_and_mode(machine, "/run/weightcache/3.sock") == "root weightcache 660 socket"
