"""`wcache doctor`: groups of the sockets, the loader's user, and the driver's parts on disk and in the kernel."""

from __future__ import annotations

import grp
import json
import os
import pwd
from pathlib import Path

import pytest

from weightcache.cli import doctor_host, doctor_rights, systemd
from weightcache.cli.findings import Finding
from weightcache.protocol import RankReport

NOBODY = pwd.getpwnam("nobody")
DAEMON = grp.getgrnam("daemon")
BOTH_WAYS = pytest.mark.parametrize("euid", [0, 1000], indirect=True, ids=["as-that-user", "by-mode-bits"])


@pytest.fixture
def euid(request, monkeypatch) -> int:
    """Look as root would, and as somebody else would: both ways have to tell the same."""
    if request.param == 0 and os.geteuid() != 0:
        pytest.skip("only root may become another user")
    monkeypatch.setattr(doctor_rights.os, "geteuid", lambda: request.param)
    return request.param


def units(**properties: str) -> systemd.Units:
    loader = systemd.Unit(systemd.LOADER, {"User": "nobody", "SupplementaryGroups": "", **properties})
    return systemd.Units({systemd.LOADER: loader})


def readable(path: Path, mode: int = 0o644) -> Path:
    """A file below folders that everybody may enter."""
    path.touch()
    path.chmod(mode)
    for folder in path.parents:
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    return path


@BOTH_WAYS
def test_the_loaders_user(euid, tmp_path):
    good, bad = readable(tmp_path / "good"), readable(tmp_path / "bad 'x'", 0o600)
    [found] = doctor_rights.loader(units(), "/bin/sh", [good])
    assert found == Finding("ok", "loader", "nobody, who loads, may read the checkpoint and run the command")
    [found] = doctor_rights.loader(units(), "/bin/sh", [good, bad, good])
    assert (found.status, found.text) == ("problem", f"nobody, who loads, may not read {bad}")
    assert "User= in a drop-in of weightcache-loader@.service" in found.advice
    [found] = doctor_rights.loader(units(), str(good), [good])
    assert found.text == f"nobody, who loads, may not run {good}"
    (tmp_path / "shut").mkdir(mode=0o700)
    inside = tmp_path / "shut" / "file"
    inside.touch(0o644)
    [found] = doctor_rights.loader(units(), "", [inside])
    assert found.text == f"nobody, who loads, may not read {inside}"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another group")
@BOTH_WAYS
def test_the_loaders_groups(euid, tmp_path):
    file = readable(tmp_path / "file", 0o640)
    os.chown(file, -1, DAEMON.gr_gid)
    assert next(doctor_rights.loader(units(), "", [file])).status == "problem"
    assert next(doctor_rights.loader(units(SupplementaryGroups="daemon"), "", [file])).status == "ok"


def test_a_loader_unit_of_root_or_of_nobody_known(tmp_path):
    assert list(doctor_rights.loader(systemd.Units(), "/none", [tmp_path])) == []
    assert list(doctor_rights.loader(units(User=""), "/none", [tmp_path])) == []
    [found] = doctor_rights.loader(units(User="nosuchuser"), "", [])
    assert (found.status, found.advice) == (
        "problem",
        "systemd-sysusers makes those of the package; your own come from a drop-in",
    )
    [found] = doctor_rights.loader(units(SupplementaryGroups="nosuchgroup"), "", [])
    assert "nosuchgroup" in found.text


def rights(host) -> list[Finding]:
    shown = [Finding(**json.loads(line)) for line in host.wcache("doctor", "--json").out.splitlines()]
    return [finding for finding in shown if finding.subject == "rights" and finding.status == "problem"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives sockets to other groups")
def test_sockets_of_two_groups(host, make_status):
    host.agent(0, RankReport(make_status()))
    assert rights(host) == []
    os.chown(host.run / "0.sock", -1, DAEMON.gr_gid)
    [found] = rights(host)
    assert found.text == ("members of daemon may attach on rank 0, and may not renew their leases at its status socket")
    assert found.advice.startswith("agent.socket_group = daemon, and SupplementaryGroups=daemon in drop-ins")
    host.config.write_text('[agent]\nsocket_group = "daemon"\n' + host.config.read_text())
    os.chown(host.run / "0.status.sock", -1, DAEMON.gr_gid)
    assert rights(host) == []
    os.chown(host.run / "0.sock", -1, 0)
    [found] = rights(host)
    assert found.text == "agent.socket_group is daemon, and the socket of rank 0 belongs to the group root"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a socket to another group")
def test_publishers_who_cannot_reach_the_socket(host, make_status):
    host.agent(0, RankReport(make_status()))
    host.config.write_text('[policy]\npublishers = ["root", "nobody", "4242424"]\n' + host.config.read_text())
    (host.run / "0.publish.sock").touch()
    os.chown(host.run / "0.publish.sock", -1, DAEMON.gr_gid)
    [found] = rights(host)
    assert "names nobody, who is not in the group daemon of the publish socket" in found.text
    assert found.advice.startswith("usermod -aG daemon nobody")
    os.chown(host.run / "0.publish.sock", -1, NOBODY.pw_gid)
    assert rights(host) == []


# -- driver --------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A loaded module 580.95.05, and a folder for libraries."""
    monkeypatch.setattr(doctor_host, "PROC", tmp_path)
    monkeypatch.setattr(doctor_host, "LIBRARIES", (tmp_path / "none", tmp_path / "lib"))
    monkeypatch.setattr(doctor_host, "PERSISTENCED", tmp_path / "persistenced")
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n"
    )
    (tmp_path / "lib").mkdir()
    return tmp_path


def library(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}.so.{version}").touch()
    (folder / f"{name}.so.1").unlink(missing_ok=True)
    (folder / f"{name}.so.1").symlink_to(f"{name}.so.{version}")


def test_libraries_of_the_loaded_module(driver):
    library(driver / "lib", "libcuda", "580.95.05")
    library(driver / "lib", "libnvidia-ml", "580.95.05")
    assert [(f.status, f.subject, f.text) for f in doctor_host.libraries()] == [
        ("ok", "libcuda", "580.95.05, as the loaded module"),
        ("ok", "libnvidia-ml", "580.95.05, as the loaded module"),
    ]


def test_libraries_newer_than_the_loaded_module(driver):
    library(driver / "lib", "libcuda", "580.105.08")
    [found] = doctor_host.libraries()
    assert (found.status, found.subject) == ("problem", "libcuda")
    assert found.text.startswith("580.105.08, and the loaded module is 580.95.05: new engines and loaders fail")
    assert found.advice.startswith("what is resident stays good")


def test_libraries_that_tell_nothing(driver):
    (driver / "lib" / "libcuda.so.1").touch()
    (driver / "lib" / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.1")
    assert list(doctor_host.libraries()) == []
    library(driver / "lib", "libcuda", "580.105.08")
    (driver / "driver/nvidia/version").unlink()
    assert list(doctor_host.libraries()) == list(doctor_host.persistence()) == []


def test_the_persistence_daemon(driver):
    [found] = doctor_host.persistence()
    assert (found.status, found.advice) == ("note", "systemctl enable --now nvidia-persistenced")
    (driver / "persistenced").touch()
    [found] = doctor_host.persistence()
    assert found.status == "ok"
