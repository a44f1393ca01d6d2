"""What `wcache doctor` and `wcache status` make of systemd's answers, with a systemctl that says what a test wants."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pytest

from weightcache import paths, records
from weightcache.cli import doctor_kept, systemd
from weightcache.cli.findings import Finding
from weightcache.protocol import DrainInfo, RankReport

SERVICE, SOCKET, LOADER = "weightcache@0.service", "weightcache@0.socket", "weightcache-loader.socket"
WARM = "weightcache-warm@0.service"
USUAL = {
    SERVICE: {
        "LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "static",
        "NRestarts": "0", "NFileDescriptorStore": "4", "FileDescriptorStoreMax": "1024", "Restart": "always",
        "RestartPreventExitStatus": "", "FileDescriptorStorePreserve": "restart", "NeedDaemonReload": "no",
    },
    SOCKET: {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"},
    LOADER: {"LoadState": "loaded", "ActiveState": "active", "SubState": "listening", "UnitFileState": "enabled"},
    WARM: {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "UnitFileState": "disabled"},
}  # fmt: skip
STOPPED = {"ActiveState": "inactive", "SubState": "dead", "NFileDescriptorStore": "0"}
Units = Callable[..., None]


@pytest.fixture
def units(host, tmp_path, monkeypatch) -> Units:
    """Install a systemctl that knows these units; a keyword changes properties of one (``service``, ``socket``...)."""
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME_DIR", host.run)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    script = folder / "systemctl"

    def install(body: str = "", **changes: dict[str, str]) -> None:
        names = {"service": SERVICE, "socket": SOCKET, "loader": LOADER, "warm": WARM, "user": systemd.LOADER}
        plain = {name: dict(properties) for name, properties in USUAL.items()}
        for short, properties in changes.items():
            plain.setdefault(names[short], {"LoadState": "loaded"}).update(properties)
        blocks = ["\n".join(f"{key}={value}" for key, value in {"Id": name, **properties}.items())
                  for name, properties in plain.items()]  # fmt: skip
        script.write_text("#!/bin/sh\n" + (body or "cat <<'END'\n" + "\n\n".join(blocks) + "\nEND\n"))
        script.chmod(0o755)

    install()
    return install


def findings(host, *subjects: str) -> list[Finding]:
    shown = [Finding(**json.loads(line)) for line in host.wcache("doctor", "--json").out.splitlines()]
    return [finding for finding in shown if finding.subject in subjects]


def one(host, subject: str) -> Finding:
    found = findings(host, subject)
    assert len(found) == 1, found
    return found[0]


def remember(host, status) -> None:
    (host.run / "0.json").write_text(json.dumps(records.to_plain(status)))


# -- whose memory it is --------------------------------------------------------------------------------------------


def test_memory_that_systemd_keeps(host, units, make_status, make_set):
    status = make_status(kept="store", backend="cuda", sets=(make_set(bytes=16_400_000_000),))
    host.agent(0, RankReport(status))
    found = one(host, "memory of rank 0")
    assert found.status == "note"
    assert found.text.startswith(
        "16.4 GB of GPU memory belong to weights that systemd (PID 1) keeps for weightcache@0.service: "
        "nvidia-smi shows them without a process, lsof and fuser on /dev/nvidia* name systemd"
    )
    assert "free nothing" in found.text
    assert found.advice.startswith("`wcache drain --rank 0` frees them, then systemctl stop weightcache@0.socket ")
    assert one(host, SERVICE).text == "active (running), systemd holds 4 descriptors of at most 1024"


def test_memory_that_only_the_agent_keeps(host, units, make_status):
    for kept in ("process", "lost"):
        host.agent(0, RankReport(make_status(kept=kept, backend="cuda")))
        text = one(host, "memory of rank 0").text
        assert "that the agent (pid 1) keeps" in text
        assert "name the agent, and fuser -k would end the agent and the engines" in text
        host.agents.pop().close()
        for name in ("0.sock", "0.status.sock"):
            (host.run / name).unlink()


@pytest.mark.parametrize(
    ("program", "named"), [("/usr/bin/python3", "wcache keeper"), ("/lib/systemd/systemd", "systemd")]
)
def test_memory_that_another_parent_keeps(host, make_status, tmp_path, monkeypatch, program, named):
    monkeypatch.setattr(doctor_kept, "PROC", tmp_path)
    for pid in (1, 812):
        (tmp_path / str(pid)).mkdir()
    (tmp_path / "1/status").write_text("Name:\tpython3\nPPid:\t812\n")
    (tmp_path / "812/cmdline").write_bytes(f"{program}\0--user\0".encode())
    host.agent(0, RankReport(make_status(kept="store")))
    found = one(host, "memory of rank 0")
    assert f"weights that {named} (pid 812) keeps for the agent (pid 1): it counts as Shmem" in found.text
    assert "systemctl" not in found.advice


def test_no_memory_no_line(host, units, make_status):
    host.agent(0, RankReport(make_status(0, "empty")))
    assert findings(host, "memory of rank 0") == []


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "service", "status", "says", "advises"),
    [
        ("store", {}, "ok", "systemd holds 4 descriptors of at most 1024", ""),
        ("store", {"FileDescriptorStoreMax": "3"}, "problem", "=3, and 5 are needed", "FileDescriptorStoreMax=1024"),
        ("lost", {"FileDescriptorStoreMax": "0"}, "problem", "=0, and 5 are needed", "restart nothing before"),
        ("lost", {}, "problem", "they would not outlive the agent", "by itself"),
        ("store", {"NFileDescriptorStore": "2"}, "problem", "holds 2 descriptors, and the weights have 3", "by itself"),
        ("store", {"FileDescriptorStoreMax": "100"}, "note", "too small for a large model", "systemctl restart"),
        ("store", {"FileDescriptorStoreMax": ""}, "", "", ""),
    ],
)
def test_the_store(host, units, make_status, kept, service, status, says, advises):
    host.agent(0, RankReport(make_status(kept=kept)))
    units(service=service)
    if not status:
        assert findings(host, SERVICE) == []
        return
    found = one(host, SERVICE)
    assert (found.status, says in found.text, advises in found.advice) == (status, True, True), found


@pytest.mark.parametrize(
    ("service", "status", "says"),
    [
        ({"Restart": "on-failure"}, "problem", "Restart=on-failure: an agent that ends"),
        ({"RestartPreventExitStatus": "78"}, "problem", "RestartPreventExitStatus=78"),
        ({"FileDescriptorStorePreserve": "yes"}, "note", "systemctl stop does not free"),
        ({"NeedDaemonReload": "yes"}, "note", "systemd has not read them"),
        ({"NRestarts": "5"}, "note", "restarted the agent 5 times"),
        ({"LoadState": "masked", "FileDescriptorStoreMax": "0"}, "problem", "masked while the agent runs"),
    ],
)
def test_units_that_were_changed(host, units, make_status, service, status, says):
    host.agent(0, RankReport(make_status(kept="store")))
    units(service=service)
    [found] = [finding for finding in findings(host, SERVICE) if finding.status != "ok"]
    assert (found.status, says in found.text) == (status, True), found
    assert found.advice


def test_weights_without_an_agent(host, units):
    units(service=STOPPED | {"NFileDescriptorStore": "7"})
    assert any("keeps 7 descriptors of weights although no agent runs" in f.text for f in findings(host, SERVICE))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "enabled; after a boot the first engine that asks starts the agent"),
        ({"warm": {"UnitFileState": "enabled"}}, "enabled; the model is loaded from boot on"),
        ({"socket": {"UnitFileState": "disabled"}}, "the rank will be off after a reboot"),
    ],
)
def test_what_a_boot_does(host, units, make_status, changes, says):
    host.agent(0, RankReport(make_status(kept="store")))
    units(**changes)
    assert says in one(host, SOCKET).text


@pytest.mark.parametrize(
    ("service", "loader", "status", "says"),
    [
        ({}, {}, "ok", "listens"),
        ({}, STOPPED, "problem", "can load and verify nothing"),
        (STOPPED, STOPPED, "note", "the next agent that starts brings it up"),
        (STOPPED, STOPPED | {"LoadState": "masked"}, "problem", "masked"),
        (STOPPED, {"ActiveState": "failed", "SubState": "failed"}, "problem", "failed (failed)"),
    ],
)
def test_the_loaders_socket(host, units, service, loader, status, says):
    units(service=service, loader=loader)
    found = one(host, LOADER)
    assert (found.status, says in found.text) == (status, True), found


# -- agents that are down ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "says", "shown"),
    [
        (
            {"service": STOPPED},
            "note",
            "not started: weightcache@0.socket listens",
            "weightcache@0.service is not running; weightcache@0.socket listens, so the next attach starts it",
        ),
        (
            {"service": STOPPED, "socket": STOPPED},
            "problem",
            "stopped: weightcache@0.socket does not listen",
            "nothing starts it but `systemctl start weightcache@0.socket`",
        ),
        (
            {"service": STOPPED, "socket": STOPPED | {"LoadState": "masked"}},
            "problem",
            "its units are masked",
            "stopped",
        ),
        (
            {"service": STOPPED, "socket": {"ActiveState": "failed", "Result": "trigger-limit-hit"}},
            "problem",
            "weightcache@0.socket failed (trigger-limit-hit)",
            "stopped",
        ),
        (
            {"service": {"ActiveState": "activating", "SubState": "auto-restart-queued", "NRestarts": "4"}},
            "problem",
            "the agent ended: weightcache@0.service is activating (auto-restart-queued) after 4 restarts",
            "weightcache@0.service is activating (auto-restart-queued)",
        ),
        (
            {"service": {"ActiveState": "failed", "SubState": "failed", "NFileDescriptorStore": "0"}},
            "problem",
            "the agent ended",
            "is failed (failed), and systemd keeps no weights for it",
        ),
        ({}, "problem", "is active (running), and its agent does not answer", "is active (running)"),
    ],
)
def test_why_an_agent_is_down(host, units, make_status, changes, status, says, shown):
    remember(host, make_status())
    os.utime(host.run / "0.json", (time.time() - 300, time.time() - 300))
    units(**changes)
    found = one(host, "rank 0")
    assert (found.status, says in found.text) == (status, True), found
    assert found.advice
    got = host.wcache("status")
    assert got.status == 69
    assert "ready (down)" in got.out
    assert "last known 5 min ago" in got.out
    assert shown in got.out


def test_markers_of_an_agent_that_is_down(host, units):
    units(service=STOPPED)
    (host.run / "0.drained").write_text(json.dumps(records.to_plain(DrainInfo(0, 1e9))))
    (host.run / "0.failed").write_text('{"code": "load-failed", "message": "no such model", "at": 1.0}')
    _, drained, failed = findings(host, "rank 0")
    assert drained.text.startswith("drained by root at 2001-09-")
    assert "wcache resume --rank 0" in drained.advice
    assert failed.text.startswith("the last load failed (no such model)")


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "7", '{"uid": "x"}', "\xff", "[" * 50000])
def test_markers_that_make_no_sense_count(host, content):
    for name in ("0.drained", "0.failed"):
        (host.run / name).write_bytes(content.encode("latin-1"))
    texts = [found.text for found in findings(host, "rank 0")]
    assert [text.split(":")[0] for text in texts[1:]] == ["drained", "the last load failed (nobody wrote why)"]


def test_an_agent_that_answers_speaks_for_itself(host, units, make_status):
    (host.run / "0.drained").write_text("{}")
    host.agent(0, RankReport(make_status(0, "drained", drained=DrainInfo(0, 1e9))))
    assert [found.text for found in findings(host, "rank 0")] == ["drained, 0 sets"]


# -- no systemd ----------------------------------------------------------------------------------------------------


def about_units(host) -> list[Finding]:
    return findings(host, SERVICE, SOCKET, LOADER, WARM, "systemd")


@pytest.mark.parametrize(
    "body",
    [
        "echo 'System has not been booted with systemd' >&2; exit 1",
        "echo nonsense",
        "printf 'Id=weightcache@0.service\\nLoadState=not-found\\n'",
        "printf '\\377=\\377'",
        "kill -9 $$",
    ],
)
def test_without_systemd_nothing_is_said_of_it(host, units, body):
    units(body + "\n")
    assert about_units(host) == []
    assert one(host, "rank 0").text.startswith("no agent listens at ")
    assert "weightcache@0" not in host.wcache("status").out


def test_without_systemctl_nothing_is_said_of_systemd(host, units, monkeypatch):
    monkeypatch.setenv("PATH", str(host.run))
    assert about_units(host) == []


def test_a_directory_of_ones_own_has_no_units(host, units, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME_DIR", tmp_path / "elsewhere")
    assert about_units(host) == []


def test_a_systemd_that_does_not_answer_is_not_waited_for(host, units, monkeypatch):
    monkeypatch.setattr(systemd, "SECONDS", 0.2)
    units("exec sleep 60\n")
    started = time.monotonic()
    assert one(host, "systemd").text == "systemctl does not answer"
    assert time.monotonic() - started < 10


# -- what the agent says itself --------------------------------------------------------------------------------------


def test_who_keeps_the_descriptors(host, make_status):
    for rank, kept in enumerate(("store", "process", "lost")):
        host.agent(rank, RankReport(make_status(rank, kept=kept)))
    host.agent(3, RankReport(make_status(3, "empty", kept="store")))
    got = host.wcache("status")
    column = got.out.splitlines()[0].index("KEPT")
    assert [line[column:].split()[0] for line in got.out.splitlines()[1:5]] == ["store", "process", "lost", "-"]
    assert got.out.count("NOT safe from a crash") == 1
    assert "rank 2: NOT safe from a crash" in got.out


def test_a_suspect_set(host, make_status, make_set):
    entry = make_set(suspect="pid 7, attached for 3 s, ended with SIGBUS\x1b")
    host.agent(0, RankReport(make_status(sets=(entry,))))
    assert (
        "rank 0:   suspect, and being examined: pid 7, attached for 3 s, ended with SIGBUS\\x1b"
        in host.wcache("status").out
    )
    assert any("set s1abcd is examined before anybody gets it again" in f.text for f in findings(host, "rank 0"))


def test_errors_of_a_rank_that_serves_are_no_state(host, make_status):
    from weightcache.protocol import ErrorInfo

    host.agent(0, RankReport(make_status(error=ErrorInfo("config", "memry: unknown key"))))
    got = host.wcache("status")
    assert got.status == 0
    assert "rank 0: error: memry: unknown key [config]" in got.out
