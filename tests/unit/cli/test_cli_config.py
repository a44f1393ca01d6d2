"""`wcache config`: checking, reading, and edits that keep comments, order, owner and mode."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from weightcache import config, paths
from weightcache.cli import config_edit
from weightcache.cli.config_keys import parse_key
from weightcache.cli.main import main

GPU_A = "GPU-01234567-89ab-cdef-0123-456789abcdef"
GPU_B = "GPU-11234567-89ab-cdef-0123-456789abcdef"
TEXT = """# what this host holds
[memory]  # where
arena_bytes = "2MiB"   # small
backend = "host"

# the loader
[loader]
command = ["python3", "-m", "weightcache.loader"]

[[rank]]
rank = 0
"""


@pytest.fixture(autouse=True)
def content(host):
    host.config.write_text(TEXT)


def test_check(host, tmp_path, monkeypatch):
    got = host.wcache("config", "check")
    assert (got.status, got.out) == (0, f"{host.config}: valid (host memory, 1 rank, no model to hold)\n")
    other = tmp_path / "other.toml"
    other.write_text('[memory]\nbakend = "host"\n')
    got = host.wcache("config", "check", str(other))
    assert (got.status, got.out) == (78, "")
    assert got.err == f'wcache: {other}: memory.bakend: unknown key (did you mean "backend"?)\n'
    assert host.wcache("config", "check", str(tmp_path / "none")).status == 78
    monkeypatch.setattr(paths, "CONFIG_FILE", tmp_path / "nothing.toml")
    assert main(["config", "check"]) == 0


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("memory.backend", "host\n"),
        ("memory.arena_bytes", "2097152\n"),
        ("memory", '{"backend": "host", "arena_bytes": 2097152}\n'),
        ("policy.donation", "true\n"),
        ("loader.command", '["python3", "-m", "weightcache.loader"]\n'),
        ("loader.timeout_seconds", "7200.0\n"),
        ("loader.environment", "{}\n"),
        ("loader.environment.A", ""),
        ("agent.runtime_dir", ""),
        ("model", ""),
        ("model.arguments", ""),
        ("rank", '[{"rank": 0, "gpu": ""}]\n'),
        ("rank[0].rank", "0\n"),
        ("rank[7].rank", ""),
    ],
)
def test_get(host, key, shown):
    got = host.wcache("config", "get", key)
    assert (got.status, got.out, got.err) == (0, shown, "")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("memory.bakend", "memory.backend"),
        ("backend", "memory.backend"),
        ("memory.backend.x", "memory.backend"),
        ("loader.environment.", "loader.environment"),
        ("rank[0].gpuu", "rank[0].gpu"),
        ("ranks[0].gpu", "rank[0].gpu"),
    ],
)
@pytest.mark.parametrize("command", [["get"], ["set"]])
def test_unknown_keys_name_the_nearest(host, command, key, near):
    got = host.wcache("config", *command, key, *(["1"] if command == ["set"] else []))
    assert got.status == 2
    assert got.err == f'wcache: unknown key {key!r} (did you mean "{near}"?)\n'
    assert host.config.read_text() == TEXT


def test_a_rank_key_needs_a_number(host):
    got = host.wcache("config", "get", "rank.gpu")
    assert (got.status, got.err) == (2, "wcache: which rank table? write rank[0].gpu, rank[1].gpu, ...\n")


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("memory.arena_bytes", "0", 'arena_bytes = "2MiB"   # small', "arena_bytes = 0   # small"),
        ("memory.arena_bytes", "4MiB", '"2MiB"', '"4MiB"'),
        ("loader.command", '["x"]', '["python3", "-m", "weightcache.loader"]', '["x"]'),
        ("rank[0].rank", "3", "rank = 0", "rank = 3"),
        ("policy.donation", "false", TEXT, TEXT + "\n[policy]\ndonation = false\n"),
        ("rank[1]", "{ rank = 1 }", TEXT, TEXT + "\n[[rank]]\nrank = 1\n"),
        ("agent.socket_group", "gpu users", TEXT, TEXT + '\n[agent]\nsocket_group = "gpu users"\n'),
    ],
)
def test_set_keeps_everything_else(host, key, value, before, after):
    got = host.wcache("config", "set", key, value)
    assert (got.status, got.err) == (0, "")
    assert got.out == f"{host.config}: {key} is set; agents see it when they restart\n"
    assert host.config.read_text() == TEXT.replace(before, after)
    assert host.wcache("config", "set", key, value).out == f"{host.config}: {key} was so already\n"


def test_set_a_model_step_by_step(host):
    assert host.wcache("config", "set", "loader.environment.HF_HOME", "/srv/hf").status == 0
    assert host.wcache("config", "set", "model.arguments", '["--model-path", "/m"]').status == 0
    got = config.load(host.config)
    assert got.model == config.ModelConfig(("--model-path", "/m"))
    assert got.loader.environment == {"HF_HOME": "/srv/hf"}
    assert host.config.read_text().startswith(TEXT[:40])


def test_set_whole_tables(host):
    ranks = f'[{{rank = 0, gpu = "{GPU_A}"}}, {{rank = 1, gpu = "{GPU_B}"}}]'
    assert host.wcache("config", "set", "rank", ranks).status == 78
    assert host.wcache("config", "set", "memory", '{backend = "host"}').status == 0
    assert "[memory]" in host.config.read_text()
    assert host.config.read_text().count("# the loader") == 1
    assert config.load(host.config).memory == config.MemoryConfig("host")
    assert host.wcache("config", "set", "rank", "[{rank = 4}, {rank = 5}]").status == 0
    assert host.config.read_text().endswith("[[rank]]\nrank = 4\n\n[[rank]]\nrank = 5\n")
    assert host.wcache("config", "set", "rank", "[{rank = 5}]").status == 0
    assert config.load(host.config).ranks == (config.RankConfig(5),)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("memory.backend", "gpu", 'memory.backend: expected "cuda" or "host", got "gpu"'),
        ("memory.backend", "1", 'memory.backend: expected "cuda" or "host", got 1'),
        ("memory.backend", "cuda", "rank[0].gpu: backend cuda needs"),
        ("memory.arena_bytes", "3", "multiple of 2 MiB"),
        ("policy.donation", "yes", 'expected true or false, got "yes"'),
        ("memory", "{bakend = 1}", 'memory.bakend: unknown key (did you mean "backend"?)'),
        ("agent.runtime_dir", "run", "absolute path"),
        ("memory.backend", '"host"\nzz = 1', "expected"),
        ("rank[1]", "5", "rank[1]: expected a table, got 5"),
    ],
)
def test_a_bad_value_changes_nothing(host, key, value, says):
    got = host.wcache("config", "set", key, value)
    assert got.status == 78
    assert says in got.err
    assert host.config.read_text() == TEXT
    assert sorted(entry.name for entry in host.config.parent.iterdir()) == ["run", host.config.name]


@pytest.mark.parametrize(("key", "value"), [("rank[3]", "{rank = 1}"), ("rank[1].rank", "1")])
def test_rank_tables_are_added_one_after_the_other(host, key, value):
    got = host.wcache("config", "set", key, value)
    assert got.status == 2, got.err
    assert host.config.read_text() == TEXT


def test_set_keeps_mode_and_symbolic_links(host, tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to(host.config)
    host.config.chmod(0o640)
    assert main(["--config", str(link), "config", "set", "memory.arena_bytes", "0"]) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(host.config.stat().st_mode) == 0o640
    assert "arena_bytes = 0" in host.config.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_set_keeps_the_owner(host):
    os.chown(host.config, 65534, 65534)
    assert host.wcache("config", "set", "memory.arena_bytes", "0").status == 0
    assert (host.config.stat().st_uid, host.config.stat().st_gid) == (65534, 65534)


def test_set_makes_a_new_file(host):
    host.config.unlink()
    assert host.wcache("config", "set", "memory.backend", "host").status == 0
    assert host.config.read_text() == '[memory]\nbackend = "host"\n'
    assert stat.S_IMODE(host.config.stat().st_mode) == 0o644


def test_set_where_it_cannot_write(host, tmp_path):
    got = host.wcache("--config", str(tmp_path / "none/w.toml"), "config", "set", "memory.backend", "host")
    assert got.status == 78
    assert "cannot be written (No such file or directory)" in got.err
    got = host.wcache("--config", str(tmp_path), "config", "set", "memory.backend", "host")
    assert got.status == 78
    assert "Is a directory" in got.err


def test_set_in_a_broken_file(host):
    host.config.write_text("[memory\n")
    got = host.wcache("config", "set", "memory.backend", "host")
    assert got.status == 78
    assert f"{host.config}: line 1, column 8: not TOML" in got.err


def test_a_failure_while_writing_leaves_the_old_file(host, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(config_edit.os, "fsync", fail)
    got = host.wcache("config", "set", "memory.arena_bytes", "0")
    assert (got.status, got.err) == (78, f"wcache: {host.config}: cannot be written (No space left on device)\n")
    assert host.config.read_text() == TEXT
    assert sorted(entry.name for entry in host.config.parent.iterdir()) == ["run", host.config.name]


def test_without_tomlkit(host):
    code = (
        "import sys; sys.modules['tomlkit'] = None; from weightcache.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--config", str(host.config), "config", "set", "memory.arena_bytes", "0"]
    got = subprocess.run(command, capture_output=True, text=True)
    assert got.returncode == 78
    assert got.stderr.startswith("wcache: `wcache config set` needs tomlkit, which this Python lacks")
    assert got.stderr.count("\n") == 1
    assert host.config.read_text() == TEXT


KEYS = [
    "agent.socket_group",
    "memory.backend",
    "memory",
    "rank",
    "rank[0]",
    "rank[1]",
    "loader.command",
    "model",
    "policy",
]
VALUES = ['["a", "b"]', "{}", "[]", "1", "true", "{rank = 5}", '{backend = "host"}', "[{rank = 2}]", "1\n"]
word = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(key=st.sampled_from(KEYS), value=st.sampled_from(VALUES) | word)
def test_any_edit_gives_a_valid_file_or_changes_nothing(tmp_path_factory, key, value):
    path: Path = tmp_path_factory.getbasetemp() / "edit.toml"
    path.write_text(TEXT)
    status = main(["--config", str(path), "config", "set", "--", key, value])
    assert status in (0, 2, 78)
    if status:
        assert path.read_text() == TEXT
    else:
        config.load(path)
        assert "# what this host holds" in path.read_text()


def test_values():
    assert config_edit.parse_value("true") is True
    assert config_edit.parse_value("1GiB") == "1GiB"
    assert config_edit.parse_value("1\nx = 2") == "1\nx = 2"
    assert config_edit.parse_value("") == ""
    assert config_edit.parse_value("[" * 100000) == "[" * 100000
    assert parse_key("rank[2].gpu").steps == ("rank", 2, "gpu")
    assert parse_key("loader.environment.A.B").steps == ("loader", "environment", "A.B")
