"""Client and off mode, over a stand-in for SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.support import ATTACHED, FINGERPRINT, alive, eventually, free_port, set_status
from weightcache import transport
from weightcache.checkpoint import identity
from weightcache.compiled import places
from weightcache.engine import directive
from weightcache.errors import AgentUnavailable

GOOD = [["ready", "main"], ["ready", "scheduler"], ["decision", ATTACHED]]
DIFFERENT = {
    "rank": 0, "role": "target", "outcome": "disk", "code": "mismatch", "message": "the resident set differs",
    "differences": [{"field": "dtype", "cached": "bfloat16", "engine": "float16", "consequence": "wrong values"}],
}  # fmt: skip


def test_attach_is_told_on_one_line_a_rank(launcher, agent):
    agent()
    launcher.script(*GOOD)
    launcher.environment["SGLANG_PLUGINS"] = "other"
    arguments = ["--model-path", "/models/a", "--served-model-name", "x y"]
    before = dict(launcher.environment)
    status, out, err = launcher.run("--wcache-wait", "7", *arguments, "--weight-cache-mode", "client")
    assert (status, out) == (0, "")
    assert err == (
        "weightcache: rank 0: attached set 1a2b1a2b.. (272 tensors, 0.27 GB in 1 arena, 55 ms: "
        "receive 1, map 2, build 40, bind 12)\n"
    )
    (run,) = launcher.runs
    assert run["argv"] == arguments
    told = directive.read(run["env"])
    assert told is not None
    assert (told.purpose, told.backend, told.on_mismatch, told.wait_seconds) == ("engine", "host", "fallback", 7)
    assert told.sockets == {"rank:0": str(launcher.runtime_dir / "0.sock")}
    assert (told.from_disk, told.explain, told.donate) == ("", False, True)
    # Exactly what the launcher adds, and nothing else.
    after = {k: v for k, v in run["env"].items() if k not in ("LC_CTYPE", "PWD", "_")}
    assert after.pop("SGLANG_PLUGINS") == "other,weightcache"
    assert after.pop(directive.VARIABLE)
    before.pop("SGLANG_PLUGINS")
    (compiled,) = Path(before["WEIGHTCACHE_CACHE_DIR"], "compiled").iterdir()
    stay = json.loads((compiled / "stamp.json").read_text())["stay"]
    for name, value in places.variables(compiled, before, stay).items():
        assert after.pop(name) == value
    assert after == {k: v for k, v in before.items() if k not in ("LC_CTYPE", "PWD", "_")}
    assert not Path(told.report).parent.exists()


def test_gpu_agents_are_found_by_uuid_and_win_unless_the_device_is_the_cpu(launcher, agent):
    agent(0, backend="cuda", gpu_uuid="GPU-a", sets=())
    agent(1, backend="cuda", gpu_uuid="GPU-b", sets=())
    agent(2, backend="host", sets=())
    launcher.script(*GOOD)
    launcher.run("--model-path", "m")
    launcher.run("--model-path", "m", "--device", "cpu")
    first, second = [directive.read(run["env"]) for run in launcher.runs]
    assert first.backend == "cuda"
    assert first.sockets == {f"GPU-{n}": str(launcher.runtime_dir / f"{i}.sock") for i, n in enumerate("ab")}
    assert (second.backend, list(second.sockets)) == ("host", ["rank:2"])


def test_a_stopped_agent_is_woken_by_hello_on_the_public_socket(launcher, agent):
    woken = agent(doors=("public",))
    launcher.script(*GOOD)
    status, _, _ = launcher.run("--model-path", "m")
    assert status == 0
    assert [type(message).__name__ for message in woken.seen] == ["Hello"]


def test_no_agent_is_one_clear_line_then_disk(launcher):
    launcher.script(["ready", "scheduler"], ["decision", {**DIFFERENT, "differences": [], "message": "told to"}])
    status, _, err = launcher.run("--model-path", "m")
    assert status == 0
    first, second = err.splitlines()
    assert first.startswith(f"weightcache: no agent at {launcher.runtime_dir}")
    assert first.endswith("the weights will be loaded from disk")
    assert second == "weightcache: rank 0: loaded from disk: told to"
    told = directive.read(launcher.runs[0]["env"])
    assert told.from_disk.startswith("no agent at")
    assert not told.donate
    status, _, _ = launcher.run("--wcache-on-mismatch=error", "--model-path", "m")
    assert status == AgentUnavailable.exit_status
    assert len(launcher.runs) == 1


def test_a_dead_socket_counts_as_no_agent(launcher, agent):
    agent(doors=("public",)).close()
    launcher.script(*GOOD)
    status, _, err = launcher.run("--model-path", "m")
    assert status == 0
    assert "no agent listens at" in err


def test_a_mismatch_prints_the_table_and_serves(launcher, agent):
    agent()
    launcher.script(["ready", "scheduler"], ["decision", DIFFERENT])
    status, _, err = launcher.run("--model-path", "m", "--dtype", "float16")
    assert status == 0
    assert "weightcache: rank 0: the resident set differs in dtype\n" in err  # early, from the command line
    assert "weightcache: rank 0: loaded from disk: the resident set differs\n" in err
    assert "  field | resident | engine  | consequence\n" in err
    assert "  dtype | bfloat16 | float16 | wrong values\n" in err


def test_an_option_that_cannot_be_served_means_disk_or_an_error(launcher, agent):
    agent()
    launcher.script(["ready", "scheduler"], ["decision", {**DIFFERENT, "differences": []}])
    status, _, err = launcher.run("--model-path", "m", "--enable-eplb")
    assert status == 0
    assert err.count("--enable-eplb") == 1
    assert "--enable-eplb" in directive.read(launcher.runs[0]["env"]).from_disk
    assert launcher.run("--wcache-on-mismatch", "error", "--model-path", "m", "--enable-eplb")[0] == 2


def test_off_is_plain_sglang(launcher, agent):
    agent()
    launcher.script(["exit", 7])
    process = launcher.start("--weight-cache-mode", "off", "--model-path", "m")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (7, "", "")
    (run,) = launcher.runs
    assert run["pid"] == process.pid
    assert directive.VARIABLE not in run["env"]
    assert run["argv"] == ["--model-path", "m"]


def test_refusal_ends_with_the_errors_status(launcher, agent):
    agent()
    refused = {**DIFFERENT, "outcome": "refused", "code": "loading", "message": "still loading"}
    launcher.script(["ready", "scheduler"], ["decision", refused], ["sleep", 60])
    status, _, err = launcher.run("--model-path", "m")
    assert status == 75
    assert "rank 0: refused: still loading" in err
    assert "bfloat16" in err


@pytest.mark.parametrize("ending", [["exit", 1], ["sleep", 60]])
def test_a_failed_attach_is_started_again_from_disk_once(launcher, agent, ending):
    agent()
    failed = {**DIFFERENT, "outcome": "failed", "code": "attach-failed", "message": "bind: no", "differences": []}
    disk = {**failed, "outcome": "disk"}
    launcher.script(
        ["ready", "scheduler"], ["child"], ["decision", failed], ending,
        again=[["ready", "scheduler"], ["decision", disk], ["exit", 5]],
    )  # fmt: skip
    status, _, err = launcher.run("--model-path", "m")
    assert status == 5
    assert "attaching failed after the decision: bind: no" in err
    assert "starting the server again, from disk" in err
    first, second = launcher.runs
    assert directive.read(first["env"]).from_disk == ""
    assert directive.read(second["env"]).from_disk == "bind: no"
    assert first["argv"] == second["argv"]
    assert not alive(int(launcher.wait_for("child").read_text()))


def test_a_failed_attach_is_an_error_where_nothing_else_will_do(launcher, agent):
    agent()
    failed = {**DIFFERENT, "outcome": "failed", "code": "attach-failed", "message": "bind: no", "differences": []}
    launcher.script(["ready", "scheduler"], ["decision", failed], ["exit", 3])
    status, _, _ = launcher.run("--wcache-on-mismatch", "error", "--model-path", "m")
    assert (status, len(launcher.runs)) == (1, 1)


def test_a_second_failure_is_not_tried_again(launcher, agent):
    agent()
    failed = {**DIFFERENT, "outcome": "failed", "message": "bind: no", "differences": []}
    launcher.script(["ready", "scheduler"], ["decision", failed], ["exit", 3])
    status, _, _ = launcher.run("--model-path", "m")
    assert (status, len(launcher.runs)) == (3, 2)


def test_serving_without_proof_is_loud(launcher, agent):
    agent()
    port = str(free_port())
    launcher.script(["ready", "main"], ["listen"], ["wait", "go"], ["exit", 0])
    process = launcher.start("--model-path", "m", "--port", port)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "WARNING: the server serves, but not through weightcache" in line
    assert "in no scheduler" in line
    assert process.poll() is None
    (launcher.directory / "go").touch()
    _, rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "")


def test_serving_without_proof_is_ended_in_error_mode(launcher, agent):
    agent()
    launcher.script(["child"], ["listen"], ["sleep", 60])
    arguments = ["--wcache-on-mismatch", "error", "--model-path", "m", "--port", str(free_port())]
    status, _, err = launcher.run(*arguments)
    assert status == 69
    assert "WARNING" in err
    assert not alive(launcher.runs[0]["pid"])
    assert not alive(int(launcher.wait_for("child").read_text()))


@pytest.mark.parametrize(("mode", "expected"), [("fallback", 0), ("error", 69)])
def test_an_end_without_proof_is_loud(launcher, agent, mode, expected):
    agent()
    launcher.script(["exit", 0])
    status, _, err = launcher.run("--wcache-on-mismatch", mode, "--model-path", "m")
    assert status == expected
    assert err.count("WARNING: the server ended without a word from weightcache") == 1


def test_the_plugin_without_a_decision_is_no_proof(launcher, agent):
    agent()
    launcher.script(["ready", "main"], ["ready", "scheduler"])
    assert "no rank said how it got its weights" in launcher.run("--model-path", "m")[2]


def test_sglangs_own_failure_is_passed_through(launcher, agent):
    agent()
    launcher.script(["ready", "main"], ["exit", 2])
    status, _, err = launcher.run("--wcache-on-mismatch", "error", "--model-path", "m")
    assert (status, err) == (2, "weightcache: the server ended before any rank had weights\n")


def test_explain_starts_nothing(launcher, agent):
    agent()
    status, out, err = launcher.run("--wcache-explain", "--model-path", "m", "--dtype", "float16", "--tp", "2")
    assert (status, err, launcher.runs) == (1, "", [])
    assert "rank 0: ready, host\n" in out
    rows = {line.split("|")[0].strip(): line for line in out.splitlines() if "|" in line}
    assert "differs: another data type" in rows["dtype"]
    assert "differs: wrong shard" in rows["tp_size"]
    assert rows["pp_size"].endswith("| equal")
    assert rows["model_path"].endswith("| unknown")


def test_explain_knows_the_checkpoint(launcher, agent, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}))
    same = replace(FINGERPRINT, model_path=str(model.resolve()), checkpoint=identity(model))
    agent(sets=(set_status(fingerprint=same),))
    status, out, _ = launcher.run("--wcache-explain", "--model-path", str(model))
    assert status == 0, out
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16 "}))
    status, out, _ = launcher.run("--wcache-explain", "--model-path", str(model))
    assert status == 1
    assert "the checkpoint's files changed" in out


def test_explain_wakes_nobody(launcher, agent):
    stopped = agent(doors=("public",))
    assert launcher.run("--wcache-explain", "--model-path", "m")[0] == 69
    assert stopped.seen == []


def test_explain_full_prints_the_engines_decision(launcher, agent):
    agent()
    explained = {**DIFFERENT, "outcome": "explained"}
    launcher.script(["ready", "scheduler"], ["decision", explained], ["sleep", 60])
    status, out, _ = launcher.run("--wcache-explain=full", "--model-path", "m")
    assert status == 1
    assert "rank 0: would not attach" in out
    assert "  dtype | bfloat16 | float16 | wrong values\n" in out
    assert directive.read(launcher.runs[0]["env"]).explain
    one, two = ({**ATTACHED, "rank": rank, "outcome": "explained"} for rank in (0, 1))
    launcher.script(["ready", "scheduler"], ["decision", one], ["sleep", 0.3], ["decision", two], ["exit", 1])
    status, out, _ = launcher.run("--wcache-explain=full", "--model-path", "m", "--tp", "2")
    assert (status, out.count("would attach set 1a2b1a2b..\n")) == (0, 2)


def test_a_silent_agent_costs_seconds_not_for_ever(launcher, agent):
    agent(0, silent=True)
    agent(1)
    launcher.script(*GOOD)
    before = time.monotonic()
    status, _, _ = launcher.run("--model-path", "m")
    assert status == 0
    assert time.monotonic() - before < 15
    assert list(directive.read(launcher.runs[0]["env"]).sockets) == ["rank:1"]


def test_a_broken_default_configuration_does_not_stop_an_explicit_one_does(launcher, tmp_path):
    broken = tmp_path / "weightcache.toml"
    broken.write_text("[modle]\n")
    status, _, err = launcher.run("--wcache-config", str(broken), "--model-path", "m")
    assert status == 78
    assert "modle" in err


def test_an_interpreter_that_does_not_exist_is_a_usage_error(launcher, agent):
    agent()
    assert launcher.run("--wcache-python", "/no/python", "--model-path", "m")[0] == 2
    assert launcher.run("--weight-cache-mode", "off", "--wcache-python", "/no/python", "--model-path", "m")[0] == 2


def test_nothing_heavy_is_imported():
    code = (
        "import sys; import weightcache.launch.main, weightcache.launch.help; "
        "heavy = {'torch', 'numpy', 'sglang', 'transformers', 'cuda', 'tomlkit', 'yaml'}; "
        "print(sorted(heavy & set(sys.modules)), all('site-packages' not in (getattr(m, '__file__', '') or '') "
        "or n.startswith('weightcache') for n, m in sys.modules.items() if n not in before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import sys; before = set(sys.modules); " + code],
        capture_output=True, text=True, check=True, env={**os.environ},
    )  # fmt: skip
    assert done.stdout.strip() == "[] True"


def test_help_and_usage(launcher):
    status, out, _ = launcher.run("--wcache-help")
    assert status == 0
    assert "Examples:" in out
    assert launcher.run()[0] == 2


def test_reports_of_garbage_are_dropped(launcher, agent):
    agent()
    launcher.script(["ready", "scheduler"], ["wait", "go"], ["decision", ATTACHED])
    process = launcher.start("--model-path", "m")
    launcher.wait_for("run-0.json")
    told = directive.read(launcher.runs[0]["env"])
    for data in (b"x", b"[]", b'{"type": "Decision"}', b"[" * 100_000):
        with transport.connect(told.report, time.monotonic() + 5) as sock:
            transport.send_packet(sock, data)
    silent = transport.connect(told.report, time.monotonic() + 5)
    (launcher.directory / "go").touch()
    _, err = process.communicate(timeout=20)
    silent.close()
    assert process.returncode == 0
    assert err.count("\n") == 1
    assert eventually(lambda: not Path(told.report).exists())


def test_agents_of_other_launches_are_no_news(launcher, agent):
    agent(0)
    agent(1, sets=(set_status(fingerprint=replace(FINGERPRINT, dtype="float16")),))
    launcher.script(*GOOD)
    arguments = ["--model-path", "m", "--device", "cpu", "--dtype", "bfloat16"]
    assert launcher.run(*arguments)[2].count("\n") == 1
    assert launcher.run("--wcache-explain", *arguments)[0] == 0
    assert "rank 1" in launcher.run(*arguments, "--tp", "2")[2]


def test_an_agent_of_another_protocol_is_named(launcher, agent, monkeypatch):
    agent()
    launcher.script(*GOOD)
    monkeypatch.setattr(transport, "send_packet", _older(transport.send_packet))
    assert "speaks protocol 0" in launcher.run("--model-path", "m")[2]
    assert "speaks protocol 0" in directive.read(launcher.runs[0]["env"]).from_disk
    assert launcher.run("--wcache-on-mismatch", "error", "--model-path", "m")[0] == 76
    assert launcher.run("--weight-cache-mode", "daemon", "--model-path", "m", "--device", "cpu")[0] == 76


def _older(send):
    def older(sock, data, fds=()):
        send(sock, data.replace(b'"protocol": 1', b'"protocol": 0', 1), fds)

    return older


@pytest.mark.parametrize(("port", "refused"), [(29700, True), (29701, True), (29702, False)])
@pytest.mark.parametrize("option", ["--dist-init-addr", "--nccl-init-addr"])
def test_engines_meet_elsewhere_than_loaders(launcher, agent, port, refused, option):
    agent()
    launcher.script(*GOOD)
    file = launcher.directory / "w.toml"
    file.write_text('[memory]\nbackend = "host"\n[deployment]\ntp_size = 2\nnodes = ["gpu-a", "gpu-b"]\nport = 29700\n')
    arguments = ["--model-path", "/models/a", "--tp", "2", "--nnodes", "2", "--node-rank", "0"]
    status, _, err = launcher.run("--wcache-config", str(file), *arguments, option, f"gpu-a:{port}")
    if refused:
        assert status == 2
        assert "the loaders of this deployment meet at ports 29700 and 29701: choose another one" in err
    else:
        assert status == 0, err
    assert len(launcher.runs) == (not refused)
