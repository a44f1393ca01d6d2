"""The check and doctor roles, and the synthetic publisher, against the smallest possible agent."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bench import synthetic
from tests.bench.holder import Holder
from weightcache import errors, protocol
from weightcache.loader import check, doctor
from weightcache.memory import memfd, open_memory
from weightcache.memory.host import GRANULARITY

ARENAS = 3


@pytest.fixture
def holder(runtime_dir):
    serving = Holder(runtime_dir / "0.sock").start()
    yield serving
    serving.close()


@pytest.fixture
def published(holder):
    content, info, fds = synthetic.make(open_memory("host"), ARENAS * GRANULARITY - 3000, 7, arena_bytes=GRANULARITY)
    synthetic.publish(holder.path, content, info, fds)
    return holder


def role(holder, *extra: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args(["--socket", holder.path, "--backend", "host", *extra])


def damage(holder, index: int) -> None:
    """Replace one arena by another one whose last used byte differs, sealed like the first."""
    fd = holder.fds[1 + index]
    info = holder.info.arenas[index]
    data = bytearray(os.pread(fd, info.bytes, 0))
    data[info.used - 1] ^= 1
    replaced = memfd.sealed("damaged", bytes(data))
    os.dup2(replaced, fd, inheritable=False)
    os.close(replaced)


def test_intact_set_as_json(published, capsys):
    assert check.run(role(published, "--json")) == 0
    body = json.loads(capsys.readouterr().out)
    assert {"code": "ok", "set_id": "held", "tensors": 7, "arenas": ARENAS, "damaged": []}.items() <= body.items()
    assert body["bytes"] == sum(arena.used for arena in published.info.arenas)
    for name in ("connect_ms", "receive_ms", "map_ms", "digest_ms", "digest_gb_per_s"):
        assert body[name] > 0


def test_intact_set_as_table(published, capsys):
    assert check.run(role(published, "--set", "held")) == 0
    out = capsys.readouterr().out
    assert "verdict   intact" in out
    assert "tensors   7\n" in out


@pytest.mark.parametrize("index", range(ARENAS))
def test_damage_is_found_in_its_arena(published, capsys, index):
    damage(published, index)
    assert check.run(role(published, "--json")) == errors.DamagedSet.exit_status
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "damaged"
    assert body["damaged"] == [index]
    assert "1 of 3 arenas of set held" in body["message"]
    with pytest.raises(errors.DamagedSet, match="1 of 3 arenas"):
        check.run(role(published))
    assert f"damaged: arenas {index}\n" in capsys.readouterr().out


def test_nothing_held_is_the_agents_own_error(holder):
    with pytest.raises(errors.Empty):
        check.run(role(holder))


def test_no_agent(runtime_dir):
    with pytest.raises(errors.AgentUnavailable):
        check.run(role(SimpleNamespace(path=str(runtime_dir / "none.sock"))))


def test_check_leaves_no_descriptor_and_no_mapping(published):
    def state() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(list(Path("/proc/self/fd").iterdir())), sum("memfd:" in line for line in maps)

    check.check(open_memory("host"), published.path)
    before = state()
    for _ in range(3):
        check.check(open_memory("host"), published.path)
    # The holder's threads may still be closing their end of the last conversation.
    assert state()[0] <= before[0] + 1
    assert state()[1] == before[1]


@pytest.mark.parametrize("arenas", ["fewer", "overused"])
def test_agent_that_contradicts_itself_is_refused(published, arenas):
    infos = published.info.arenas
    wrong = infos[:-1] if arenas == "fewer" else (dataclasses.replace(infos[0], used=infos[0].bytes + 1), *infos[1:])
    published.info = dataclasses.replace(published.info, arenas=wrong)
    with pytest.raises(errors.ProtocolError):
        check.run(role(published))


def test_manifest_larger_than_its_arenas_is_refused(published):
    published.info = dataclasses.replace(published.info, arenas=published.info.arenas[:1])
    published.fds = published.fds[:2]
    with pytest.raises(errors.AttachFailed, match="the manifest describes"):
        check.run(role(published))


def test_synthetic_sets_attach_with_the_bytes_of_their_seed(published):
    memory = open_memory("host")
    figures, bound, region = synthetic.attach(memory, published.path)
    assert figures["tensors"] == len(bound) == 7
    assert figures["arenas"] == ARENAS
    again, info, fds = synthetic.make(memory, ARENAS * GRANULARITY - 3000, 7, arena_bytes=GRANULARITY)
    assert info.arenas == published.info.arenas
    assert again.bytes == figures["bytes"]
    with_other_seed = synthetic.make(memory, GRANULARITY, 1, seed=2)
    assert with_other_seed[1].arenas[0].digest != info.arenas[0].digest
    for fd in (*fds, *with_other_seed[2]):
        os.close(fd)
    assert bound[3].is_leaf
    assert not bound[3].requires_grad
    assert bound[3].shape == (again.storages[3].bytes // 2,)
    region.close()


def test_short_lived_children_attach_and_end(published):
    with synthetic.child("churn", "host", published.path, "--count", "4") as process:
        assert synthetic.first_line(process)["attached"] == 4
    assert process.returncode == 0


def test_fingerprint_of_a_synthetic_set_travels():
    info = protocol.SetInfo("target", "synthetic", "", synthetic._fingerprint(1), (), 0, 0.0, 0)
    message = protocol.Publish(info)
    assert protocol.decode(protocol.encode(message)) == message


def findings(capsys, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    status = doctor.run(parser.parse_args(list(arguments)))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row.keys() == {"status", "subject", "text", "advice"} for row in rows)
    assert status == int(any(row["status"] == "problem" for row in rows))
    return status, {row["subject"]: row for row in rows}


def test_doctor_looks_at_everything(capsys):
    _, rows = findings(capsys, "--json")
    assert rows.keys() >= {"python", "torch", "sglang", "plugin", "cuda-bindings", "gpu", "host memory"} - {"gpu"}
    assert rows["python"]["status"] == "ok"
    assert rows["host memory"]["status"] == "ok"


@pytest.mark.parametrize(("version", "status"), [("0.5.17", "ok"), ("0.5.23", "ok"), ("0.6.0", "note")])
def test_doctor_knows_the_proven_releases(capsys, monkeypatch, version, status):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    _, rows = findings(capsys)
    assert rows["sglang"]["status"] == status


def test_doctor_finds_the_plugin(capsys, monkeypatch):
    entry = SimpleNamespace(name="weightcache", value="weightcache.engine.plugin:setup")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert findings(capsys)[1]["plugin"]["status"] == "ok"
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert findings(capsys)[1]["plugin"]["status"] == "problem"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert findings(capsys)[1]["plugin"]["status"] == "problem"


def test_doctor_never_ends_in_a_traceback(capsys, monkeypatch):
    def broken(name: str) -> None:
        raise OSError("libsomething.so: cannot open shared object file\nand more")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    status, rows = findings(capsys)
    assert status == 1
    assert rows["torch"]["text"] == "OSError: libsomething.so: cannot open shared object file"


def test_doctor_calls_a_missing_gpu_a_problem_only_where_one_is_configured(capsys, monkeypatch):
    def none(bindings: object = None) -> int:
        raise errors.DeviceUnavailable("no NVIDIA driver on this machine")

    monkeypatch.setattr("weightcache.memory.cuda_vmm.device_count", none)
    assert findings(capsys)[1]["gpu"]["status"] == "note"
    assert findings(capsys, "--backend", "cuda")[1]["gpu"]["status"] == "problem"


def test_roles_can_be_declared_and_doctor_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import argparse\n"
        "from weightcache.loader import check, doctor\n"
        "check.add_arguments(argparse.ArgumentParser())\n"
        "parser = argparse.ArgumentParser(); doctor.add_arguments(parser)\n"
        "sys.exit(doctor.run(parser.parse_args([])))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    rows = {row["subject"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["torch"]["status"] == "problem"
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_for_the_check_says_nothing_about_the_set(published, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("weightcache.memory.digest.digest", fail)
    with pytest.raises(errors.NoRoom, match="too little free memory to compute digests"):
        check.check(open_memory("host"), published.path)
