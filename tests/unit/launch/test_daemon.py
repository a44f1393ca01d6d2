"""Daemon mode: agents of this launch's own, over the real agent and a loader without torch."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.support import ATTACHED, GOOD, alive
from weightcache import config
from weightcache.config import RankConfig
from weightcache.deployment import Deployment
from weightcache.engine import directive
from weightcache.errors import DeviceUnavailable, PermissionRefused, UsageError
from weightcache.launch import daemon_config, layout
from weightcache.launch.server_only import without
from weightcache.sglang_options import given

SECRETS = [
    *("--api-key", "sk-secret1"), "--admin-api-key=secret2", *("--ssl-keyfile-password", "secret3"),
    *("--ap", "secret4"), *("--watermark-config", '{"key": "secret5"}'), "--some-new-auth-key=secret6",
]  # fmt: skip


def test_first_and_second_start(daemon):
    daemon.script(*GOOD)
    arguments = ["--model-path", "org/model", "--device", "cpu", "--port", "4321", *SECRETS, "--dtype", "auto"]
    status, _, err = daemon.run(*daemon.mode, *arguments)
    assert status == 0, err
    home = daemon.runtime_dir
    pid = int(re.search(r"rank 0: started an agent under a keeper, process (\d+), log (\S+)", err)[1])
    assert f"`kill {pid}` stops keepers and agents and frees the memory" in err
    assert "rank 0: attached set 1a2b1a2b.." in err
    assert alive(pid)
    parent, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:4:2]
    assert int(parent) != os.getpid()
    assert int(session) != os.getsid(0)

    told = directive.read(daemon.runs[0]["env"])
    assert told.sockets == {"rank:0": str(home / "0.sock")}
    assert (told.on_mismatch, told.donate, told.from_disk) == ("error", False, "")
    assert daemon.runs[0]["argv"] == arguments

    file = home / "weightcache.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = config.load(file)
    assert written.model.arguments == ("--model-path", "org/model", "--device", "cpu", "--dtype", "auto")
    assert (written.memory.backend, written.ranks) == ("host", (RankConfig(0),))
    for path in home.iterdir():
        if path.is_file():
            assert b"secret" not in path.read_bytes(), path
    assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()

    status, _, err = daemon.run(*daemon.mode, *arguments)
    assert status == 0
    assert "started an agent" not in err
    assert len(daemon.runs) == 2

    status, _, err = daemon.run(*daemon.mode, *arguments, "--tp", "1", "--revision", "other")
    assert status == 1
    assert "revision | (none)   | other  | another revision of the weights" in err
    assert len(daemon.runs) == 2


def test_two_ranks_are_loaded_together(daemon):
    daemon.environment["WCTEST_FINGERPRINT"] = json.dumps({"revision": "", "override_args": "", "tp_size": 2})
    second = ["decision", {**ATTACHED, "rank": 1}]
    daemon.script(*GOOD, second)
    arguments = ["--model-path", "org/model", "--device", "cpu", "--tp", "2"]
    status, _, err = daemon.run(*daemon.mode, *arguments)
    assert status == 0, err
    assert len(re.findall(r"rank \d: started an agent under a keeper", err)) == 2
    home = daemon.runtime_dir
    written = config.load(home / "weightcache.toml")
    assert written.deployment == Deployment(tp_size=2)
    assert written.ranks == (RankConfig(0), RankConfig(1))
    assert written.model.arguments == ("--model-path", "org/model", "--device", "cpu")
    told = directive.read(daemon.runs[0]["env"])
    assert told.sockets == {f"rank:{rank}": str(home / f"{rank}.sock") for rank in (0, 1)}
    assert daemon.runs[0]["argv"] == arguments


def test_what_is_allowed_for_a_comparison_is_not_inherited(daemon):
    daemon.script(*GOOD)
    daemon.environment["WEIGHTCACHE_UNPROVEN"] = "allow"
    status, _, err = daemon.run(*daemon.mode, "--model-path", "org/model", "--device", "cpu")
    assert status == 0, err
    pid = int(re.search(r"process (\d+), log", err)[1])
    assert b"WEIGHTCACHE_UNPROVEN" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert "WEIGHTCACHE_UNPROVEN" not in daemon.runs[0]["env"]


def test_a_load_that_fails_is_the_launchers_error(daemon):
    daemon.environment["WCTEST_MODE"] = "exit"
    status, _, err = daemon.run(*daemon.mode, "--model-path", "org/model", "--device", "cpu")
    assert status == 1, err
    assert "rank 0: the loader" in err
    assert daemon.runs == []


def test_a_missing_model_is_said_before_anything_starts(daemon):
    status, _, err = daemon.run(*daemon.mode, "--model-path", "/no/such/model", "--device", "cpu")
    assert status == 66
    assert "there is no model at /no/such/model" in err
    assert not (daemon.runtime_dir / "weightcache.toml").exists()


def test_an_agent_with_another_model_is_a_mismatch(daemon, agent):
    agent()
    daemon.script(*GOOD)
    status, _, err = daemon.run(*daemon.mode, "--model-path", "m", "--device", "cpu", "--dtype", "half")
    assert status == 1
    assert "dtype | bfloat16 | float16 | another data type: wrong values" in err
    assert daemon.runs == []


def test_an_empty_agent_is_told_to_load(daemon, agent):
    waiting = agent(state="empty", sets=(), model="")
    daemon.script(*GOOD)
    status, _, err = daemon.run(*daemon.mode, "--model-path", "m", "--device", "cpu")
    assert status == 0
    assert "weightcache: rank 0: loading, 1.0 of 2.0 GB, 3 s\n" in err
    assert [type(m).__name__ for m in waiting.seen] == ["Status", "Load", "Status"]


def test_agents_for_only_some_ranks_are_not_enough(daemon, agent):
    agent()
    status, _, err = daemon.run(*daemon.mode, "--model-path", "m", "--device", "cpu", "--tp", "2")
    assert status == 69
    assert "none serves rank:1" in err


def test_several_nodes_need_agents_that_are_configured(daemon):
    arguments = ["--model-path", "org/model", "--device", "cpu", "--tp", "2", "--nnodes", "2", "--node-rank", "0"]
    status, _, err = daemon.run(*daemon.mode, *arguments, "--dist-init-addr", "a:29500")
    assert status == 2
    assert "run agents with nodes in [deployment] on all of them, and launch with --weight-cache-mode client" in err
    assert daemon.runs == []


def test_a_launch_without_proof_is_ended(daemon, agent):
    agent()
    daemon.script(["sleep", 0])
    status, _, err = daemon.run(*daemon.mode, "--model-path", "m", "--device", "cpu")
    assert status == 69
    assert "WARNING" in err


def test_the_written_file_survives_odd_arguments(tmp_path):
    odd = ['--model-path="x"', "\x7f\x01\t", "\\", "ü\U0001f600", '{"a": "b"}']
    text = daemon_config.render("/py thon", ["--model-path", "m", *odd], "cuda", [RankConfig(3, "GPU-a")])
    data = tomllib.loads(text)
    assert data["model"]["arguments"] == ["--model-path", "m", *odd]
    assert data["loader"]["command"] == ["/py thon", "-m", "weightcache.loader"]
    assert data["rank"] == [{"rank": 3, "gpu": "GPU-a"}]
    assert "policy" not in data
    with pytest.raises(UsageError):
        daemon_config.render("p", ["\udcff"], "host", [])
    unproven = config.parse(daemon_config.render("p", ["--model-path", "m"], "host", [], True), tmp_path / "c")
    assert unproven.policy.unproven == "check"
    variables = {"A": 'x"', "B_1": ""}
    added = config.parse(
        daemon_config.render("p", ["--model-path", "m"], "host", [], environment=variables), tmp_path / "c"
    )
    assert added.loader.environment == variables
    written = daemon_config.write(tmp_path, text)
    assert written.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["weightcache.toml"]


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for path in (shared, link):
        with pytest.raises(PermissionRefused):
            daemon_config.private_directory(path)
    assert stat.S_IMODE(daemon_config.private_directory(tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_secrets_and_server_options_go_and_the_rest_stays_in_order():
    kept = ["--model", "m", "--ep", "2", "--tp=2", "--json-model-override-args", '{"a": -1}', "--trust-remote-code"]
    kept += ["--lora-paths", "a=b", "c", "--tokenizer-path", "t", "--quantization", "fp8"]
    mixed = [*kept[:4], "--host", "::", *kept[4:8], *SECRETS, "--log-requests-target", "a", "b", *kept[8:], "--po", "1"]
    assert list(without(mixed)) == kept


def test_the_models_directory_is_written_absolute(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = os.path.realpath(tmp_path / "m")
    assert daemon_config.model_arguments(["--model-path", "m"]) == ("--model-path", expected)
    assert daemon_config.model_arguments(["--model=m", "--dtype", "half"]) == (f"--model={expected}", "--dtype", "half")


def test_what_says_the_layout_is_no_argument_of_the_model():
    kept = ["--model-path", "m", "--trust-remote-code", "--ep-num-redundant-experts", "2", "--dtype", "half"]
    layout = ["--tp", "2", "--pp-size=2", "--data-parallel-size", "2", "--enable-dp-attention", "--ep", "2"]
    layout += ["--dist-init-addr", "a:1", "--nnodes", "1", "--node-rank=0", "--base-gpu-id", "1", "--gpu-id-step", "2"]
    for position in range(0, len(kept) + 1, 1):
        if position in (1, 4, 6):  # between an option and its value
            continue
        mixed = [*kept[:position], *layout, *kept[position:]]
        assert list(daemon_config.model_arguments(mixed)) == kept


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["--tp", "2"], 2),
        (["--tp", "2", "--pp-size", "2", "--ep", "2"], 4),
        (["--tp", "4", "--dp", "2", "--enable-dp-attention"], 4),
        (["--tp", "4", "--attn-dp-size", "2"], 4),
        (["--dp", "2"], 2),
        (["--tp", "2", "--dp", "2", "--base-gpu-id", "4"], 4),
    ],
)
def test_the_written_file_has_the_deployment(tmp_path, arguments, ranks):
    launch = given(["--model-path", "m", *arguments])
    wanted = [RankConfig(rank, f"GPU-0000000{rank}-89ab-cdef-0123-456789abcdef") for rank in layout.ranks(launch)]
    text = daemon_config.render("p", ["--model-path", "m"], "cuda", wanted, deployment=layout.deployment(launch))
    written = config.parse(text, tmp_path / "c")
    assert written.ranks == tuple(wanted)
    assert len(wanted) == ranks
    expected = replace(layout.deployment(launch), nodes=(), base_gpu_id=0)
    assert written.deployment == expected


GPUS = ["GPU-aa", "GPU-ab", "GPU-c", "GPU-d"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, GPUS),
        ("", []),
        ("2,0", ["GPU-c", "GPU-aa"]),
        ("GPU-d,GPU-c", ["GPU-d", "GPU-c"]),
        ("gpu-d", ["GPU-d"]),
        ("GPU-a", []),
        ("1,9,0", ["GPU-ab"]),
        ("-1", []),
        ("MIG-x", ["MIG-x"]),
    ],
)
def test_visible_gpus(chosen, expected):
    assert layout.visible(GPUS, chosen) == expected


def test_ranks_of_this_host(monkeypatch):
    monkeypatch.setattr(layout, "all_gpus", lambda: GPUS)
    two = given(["--tp", "2", "--base-gpu-id", "1"])
    assert layout.rank_configs(two, {}) == ("cuda", (RankConfig(0, "GPU-ab"), RankConfig(1, "GPU-c")))
    assert layout.rank_configs(given(["--device", "cpu"]), {}) == ("host", (RankConfig(0),))
    second = given(["--tp", "4", "--nnodes", "2", "--node-rank", "1"])
    assert [r.rank for r in layout.rank_configs(second, {})[1]] == [2, 3]
    with pytest.raises(DeviceUnavailable):
        layout.rank_configs(given(["--tp", "8"]), {})
    assert layout.rank_configs(given(["--dp", "2", "--gpu-id-step", "2"]), {})[1] == (
        RankConfig(0, "GPU-aa"),
        RankConfig(1, "GPU-c"),
    )
    # Replicas in host memory share it.
    assert layout.rank_configs(given(["--dp", "2", "--tp", "2", "--device", "cpu"]), {})[1] == (
        RankConfig(0),
        RankConfig(1),
    )
    for wrong in (["--tp", "4", "--ep", "3"], ["--dp", "2", "--attn-dp-size", "4"], ["--nnodes", "2"]):
        with pytest.raises(UsageError):
            layout.rank_configs(given(wrong), {})
    with pytest.raises(UsageError, match="--node-rank 2: there are 2 nodes"):
        layout.rank_configs(given(["--tp", "2", "--nnodes", "2", "--node-rank", "2"]), {})
    with pytest.raises(UsageError):
        layout.rank_configs(given(["--device", "xpu"]), {})
    with pytest.raises(UsageError):
        layout.rank_configs(given(["--tp", "x"]), {})
    monkeypatch.setattr(layout, "all_gpus", list)
    assert layout.rank_configs(given([]), {})[0] == "host"
    with pytest.raises(DeviceUnavailable):
        layout.rank_configs(given(["--device", "cuda"]), {})


def test_two_launches_at_once_start_one_agent(daemon):
    daemon.script(*GOOD)
    arguments = [*daemon.mode, "--model-path", "org/model", "--device", "cpu"]
    both = [daemon.start(*arguments) for _ in range(2)]
    errors = [process.communicate(timeout=40)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum(error.count("started an agent") for error in errors) == 1
