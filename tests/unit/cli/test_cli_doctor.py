"""`wcache doctor` and `wcache attach --check`: findings, the loader's part, exit statuses."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest

from weightcache.cli import doctor_agents, doctor_host, doctor_loader
from weightcache.cli.findings import Finding
from weightcache.cli.main import main
from weightcache.protocol import DrainInfo, Failure, RankReport

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.fixture
def loader(host, tmp_path):
    """Configure a loader whose command is a script with this body."""

    def configure(body: str, more: str = "") -> None:
        script = tmp_path / "loader.py"
        script.write_text("import sys, json, time, os\n" + textwrap.dedent(body))
        host.config.write_text(
            f"[loader]\ncommand = {json.dumps([sys.executable, str(script)])}\nenvironment = {{ MARK = 'x' }}\n"
            f'[memory]\nbackend = "host"\n{more}[[rank]]\nrank = 0\n'
        )

    return configure


def findings(host) -> list[Finding]:
    return [Finding(**json.loads(line)) for line in host.wcache("doctor", "--json").out.splitlines()]


def about(host, subject: str) -> list[Finding]:
    return [finding for finding in findings(host) if finding.subject == subject]


def test_all_well(host, loader, make_status, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x" * 1000)
    loader(
        "print(json.dumps({'status': 'ok', 'subject': 'sglang', 'text': ' '.join(sys.argv[1:]) + os.environ['MARK']}))",
        f'[model]\narguments = ["--model-path", "{model}"]\n',
    )
    host.agent(0, RankReport(make_status()))
    got = host.wcache("doctor")
    assert got.status == 0, got.out
    assert got.err == ""
    lines = got.out.splitlines()
    assert lines[-1] == "no problem"
    assert all(re.match(r"(ok|note)  +\S| {11}-> ", line) for line in lines[:-1]), got.out
    for line in [
        f"ok       python: {sys.version.split()[0]} at {sys.executable}",
        f"ok       configuration: {host.config} is valid",
        "ok       rank 0: ready, 1 set",
        f"ok       checkpoint: {model}, 1 file, 0.00 MB",
        "ok       sglang: doctor --json --backend hostx",
    ]:
        assert line in lines


def test_problems_come_with_advice_and_status_1(host):
    host.run.chmod(0o777)
    got = host.wcache("doctor")
    assert got.status == 1
    assert f"problem  runtime directory: {host.run} is writable by everybody\n" in got.out
    assert f"-> chmod o-w {host.run}" in got.out
    assert re.search(r"problem  rank 0: no agent listens.*\n +-> python3 -m weightcache.server --rank 0", got.out)
    assert got.out.endswith("2 problems\n")


def test_a_broken_configuration_stops_only_what_needs_it(host):
    host.config.write_text("[memry]")
    found = findings(host)
    assert found[1].status == "problem"
    assert 'did you mean "memory"' in found[1].text
    assert {"runtime directory", "open files"} <= {finding.subject for finding in found}


def test_no_configuration(host, monkeypatch, capfd):
    from weightcache import paths

    monkeypatch.setattr(paths, "CONFIG_FILE", host.config.with_name("none.toml"))
    main(["doctor", "--runtime-dir", str(host.run), "--json"])
    found = [Finding(**json.loads(line)) for line in capfd.readouterr().out.splitlines()]
    assert found[1].status == "note"
    assert "does not exist: the defaults apply" in found[1].text


def test_runtime_directories(host, monkeypatch):
    host.run.chmod(0o755)
    assert about(host, "runtime directory")[0].status == "ok"
    monkeypatch.setattr(doctor_agents, "trusted_uids", lambda: frozenset({4242}))
    assert "who is no agent's user" in about(host, "runtime directory")[0].text
    host.run.rmdir()
    assert about(host, "runtime directory")[0].status == "problem"
    host.run.touch()
    assert "is no directory" in about(host, "runtime directory")[0].text


@pytest.mark.parametrize(
    ("state", "status", "says"),
    [
        ("failed", "problem", "failed: the loader was killed by signal 9"),
        ("degraded", "problem", "degraded"),
        ("drained", "note", "drained"),
        ("loading", "ok", "loading"),
        ("empty", "ok", "empty, 0 sets"),
    ],
)
def test_states(host, make_status, state, status, says):
    host.agent(0, RankReport(make_status(0, state, drained=DrainInfo(0, 1.0) if state == "drained" else None)))
    found = about(host, "rank 0")[0]
    assert found.status == status
    assert says in found.text


def test_agents_of_other_versions_and_settings(host, make_status):
    host.agent(0, RankReport(make_status(0, version="0.0.9", gpu_uuid=GPU, backend="cuda")))
    host.agent(3, Failure("version-skew", "the peer speaks protocol 2, this side 1"))
    host.agent(4, RankReport(make_status(4)))
    (host.run / "0.sock").unlink()
    notes = [finding.text for finding in about(host, "rank 0") if finding.status == "note"]
    assert notes[0].startswith("the agent is version 0.0.9, this command is ")
    assert notes[1] == f"the agent runs on cuda {GPU}, the file says host"
    assert "is missing: engines cannot attach" in about(host, "rank 0")[-1].text
    assert about(host, "rank 3")[0] == Finding(
        "problem",
        "rank 3",
        "the peer speaks protocol 2, this side 1",
        "install the same version everywhere, then restart the agent of rank 3",
    )
    assert "has no such rank" in about(host, "rank 4")[-1].text


def test_groups(host, monkeypatch):
    text = host.config.read_text()
    host.config.write_text('[agent]\nsocket_group = "nosuchgroup"\n' + text)
    assert "there is no group nosuchgroup" in about(host, "rights")[0].text
    host.config.write_text('[agent]\nsocket_group = "daemon"\n' + text)
    monkeypatch.setattr(doctor_agents.os, "geteuid", lambda: 65534)
    monkeypatch.setattr(doctor_agents.os, "getegid", lambda: 65534)
    monkeypatch.setattr(doctor_agents.os, "getgroups", lambda: [])
    found = about(host, "rights")[0]
    assert found.status == "problem"
    assert found.advice.startswith("usermod -aG daemon nobody")
    monkeypatch.setattr(doctor_agents.os, "getgroups", lambda: [1])
    assert about(host, "rights")[0].status == "ok"
    host.config.write_text('[agent]\nsocket_group = "root"\n' + text)
    found = about(host, "rights")[0]
    assert found.text == "the sockets belong to the group of root: only root may attach"
    assert "usermod" not in found.advice


def test_publishers(host):
    host.config.write_text('[policy]\npublishers = ["root", "0", "nosuchuser"]\n' + host.config.read_text())
    (found,) = [finding for finding in about(host, "rights") if finding.status == "problem"]
    assert found.text == "policy.publishers: there is no user nosuchuser"


def test_systemd_looks_after_the_systems_directory(host, make_status, monkeypatch):
    from weightcache import paths

    monkeypatch.setattr(paths, "SYSTEM_RUNTIME_DIR", host.run)
    assert about(host, "rank 0")[0].advice.startswith("systemctl start weightcache@0; journalctl -u")
    host.agent(0, RankReport(make_status(version="0.0.9")))
    assert about(host, "rank 0")[0].advice == "systemctl restart weightcache@0"
    host.run.rename(host.run.with_name("elsewhere"))
    assert about(host, "runtime directory")[0].advice.startswith("systemd-tmpfiles --create")
    host.run.with_name("elsewhere").rename(host.run)


def test_limits(host, monkeypatch):
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda _: (256, 4096))
    found = about(host, "open files")[0]
    assert (found.status, found.advice) == ("problem", "ulimit -n 1024")


def test_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_host, "PROC", tmp_path)
    assert next(iter(doctor_host.memory(0))).status == "note"
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   2000 kB\n")
    assert next(iter(doctor_host.memory(10**6))).status == "ok"
    found = next(iter(doctor_host.memory(10**9)))
    assert (found.status, found.text) == ("note", "2.05 MB available, and the checkpoint has 1.00 GB")
    monkeypatch.setattr(doctor_host, "DEV", tmp_path / "none")
    assert list(doctor_host.memory(0))[-1].status == "problem"


def test_devices(monkeypatch, tmp_path):
    from weightcache.config import Config, MemoryConfig, RankConfig

    config = Config(memory=MemoryConfig("cuda"), ranks=(RankConfig(0, GPU), RankConfig(1, GPU.replace("0123", "9"))))
    monkeypatch.setattr(doctor_host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(doctor_host, "DEV", tmp_path)
    (absent,) = doctor_host.devices(config)
    assert absent.status == "problem"
    assert "wcache config set memory.backend host" in absent.advice
    driver = tmp_path / "proc/driver/nvidia"
    (driver / "gpus/0000:01:00.0").mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    (driver / "gpus/0000:01:00.0/information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {GPU}\n")
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia7").touch()
    found = list(doctor_host.devices(config))
    assert [(f.status, f.subject.rpartition("/")[2]) for f in found] == [
        ("ok", "NVIDIA driver"),
        ("ok", "nvidiactl"),
        ("problem", "nvidia-uvm"),
        ("ok", "nvidia7"),
        ("ok", "rank 0"),
        ("problem", "rank 1"),
    ]
    assert found[0].text == "580.95.05"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("sys.exit('No module named weightcache')", "problem", "ended with status 1: No module named weightcache"),
        ("pass", "problem", "ended with status 0: without a word"),
        ("print('[1]'); print('hello')", "problem", "ended with status 0: hello"),
        ("os.kill(os.getpid(), 9)", "problem", "ended with status -9"),
    ],
)
def test_a_loader_command_that_cannot(host, loader, body, status, says):
    loader(body)
    found = about(host, "loader")[-1]
    assert found.status == status
    assert says in found.text
    assert "weightcache.loader" in found.advice


def test_the_loaders_problems_count(host, loader, make_status):
    host.agent(0, RankReport(make_status()))
    loader(
        """
        print("a library says hello")
        print(json.dumps({"status": "note", "subject": "a", "text": "b", "advice": "c\\x1b"}))
        print(json.dumps({"status": "terrible", "subject": "a", "text": "b"}))
        print(json.dumps({"status": "problem", "subject": "torch", "text": "absent", "advice": "pip install torch"}))
        sys.exit(1)
        """
    )
    got = host.wcache("doctor")
    assert got.status == 1
    assert "note     a: b\n           -> c\\x1b\n" in got.out
    assert got.out.endswith("problem  torch: absent\n           -> pip install torch\n1 problem\n")


def test_a_loader_that_hangs_is_killed_with_its_children(host, loader, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_loader, "DEADLINE_SECONDS", 0.5)
    loader(
        f"""
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        time.sleep(1000)
        """
    )
    started = time.monotonic()
    found = about(host, "loader")[-1]
    assert time.monotonic() - started < 5
    assert (found.status, found.text) == ("problem", "no end after 0 s")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_loader_command_that_is_not_there(host):
    host.config.write_text('[loader]\ncommand = ["/none/python"]\n[memory]\nbackend = "host"\n')
    (found,) = about(host, "loader")
    assert (found.status, found.text) == ("problem", "/none/python is not found")
    host.config.write_text(f'[loader]\ncommand = ["{host.config}"]\n[memory]\nbackend = "host"\n')
    (found,) = about(host, "loader")
    assert found.text == f"{host.config} is not executable"
    got = host.wcache("attach", "--check")
    assert got.status == 78
    assert got.err == f"wcache: loader.command: '{host.config}' cannot be started (Permission denied)\n"


@pytest.mark.parametrize(
    ("make", "status", "says"),
    [
        (lambda path: None, "problem", "does not exist"),
        (lambda path: path.mkdir(), "problem", "config.json does not exist"),
        (lambda path: (path.mkdir(), (path / "config.json").touch()), "problem", "holds no weights"),
        (lambda path: path.write_bytes(b"x"), "ok", "0.00 MB"),
    ],
)
def test_checkpoints(host, loader, tmp_path, make, status, says):
    loader("pass", f'[model]\narguments = ["--model={tmp_path}/m"]\n')
    make(tmp_path / "m")
    (found,) = about(host, "checkpoint")
    assert found.status == status
    assert says in found.text


def test_a_model_of_a_hub(host, loader):
    loader("pass", '[model]\narguments = ["--model", "org/name"]\n')
    (found,) = about(host, "checkpoint")
    assert (found.status, "no local path" in found.text) == ("note", True)


def test_attach_check_runs_the_loaders_command(host, loader, capfd):
    loader("print(json.dumps([sys.argv[1:], os.environ['MARK']])); sys.exit(3)")
    got = main(["--config", str(host.config), "--runtime-dir", str(host.run), "attach", "--check", "--set", "s1"])
    assert got == 3
    expected = ["check", "--socket", str(host.run / "0.status.sock"), "--backend", "host", "--set", "s1"]
    assert json.loads(capfd.readouterr().out) == [expected, "x"]
    loader("print(json.dumps(sys.argv[1:])); os.kill(os.getpid(), 9)")
    host.config.write_text(host.config.read_text() + "[[rank]]\nrank = 1\n")
    command = ["--config", str(host.config), "--runtime-dir", str(host.run), "attach", "--check", "--json"]
    assert main(command) == 137
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == [str(host.run / f"{rank}.status.sock") for rank in (0, 1)]
    assert all(line[-1] == "--json" for line in lines)
    assert main([*command, "--rank", "1"]) == 137
    assert len(capfd.readouterr().out.splitlines()) == 1


def test_attach_check_names_the_gpu(host, loader, capfd):
    loader("print(json.dumps(sys.argv[1:]))")
    text = host.config.read_text().replace('"host"', '"cuda"').replace("rank = 0", f'rank = 0\ngpu = "{GPU}"')
    host.config.write_text(text)
    assert main(["--config", str(host.config), "--runtime-dir", str(host.run), "attach", "--check"]) == 0
    assert json.loads(capfd.readouterr().out)[-4:] == ["--backend", "cuda", "--gpu", GPU]


def test_attach_check_without_a_loader(host):
    got = host.wcache("attach", "--check")
    assert got.status == 78
    assert got.err == f"wcache: {host.config}: loader.command is not set, and this needs the loader's environment\n"
