"""weightcache.toml: what is accepted, and the one sentence for everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightcache import config, paths
from weightcache.config import Config, MemoryConfig, RankConfig
from weightcache.errors import ConfigError

GPU_A = "GPU-01234567-89ab-cdef-0123-456789abcdef"
GPU_B = "GPU-11234567-89ab-cdef-0123-456789abcdef"
MODEL = '[loader]\ncommand = ["python3"]\n[model]\narguments = '


def parse(text: str) -> Config:
    return config.parse(text, Path("/etc/w.toml"))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.exit_status == 78
    message = caught.value.message
    assert message.startswith("/etc/w.toml: ")
    assert "\n" not in message
    return message.removeprefix("/etc/w.toml: ")


def test_an_empty_file_is_the_defaults() -> None:
    assert parse("") == Config(path=Path("/etc/w.toml"))


def test_a_full_file() -> None:
    got = parse(
        f"""
        [agent]
        runtime_dir = "/run/x"
        socket_group = "gpu"
        [loader]
        command = ["/opt/sglang/bin/python", "-m", "weightcache.loader"]
        environment = {{ A = "1" }}
        timeout_seconds = 10
        stall_seconds = 2.5
        [model]
        arguments = ["--model-path=/m", "--port", "30000"]
        [memory]
        backend = "cuda"
        arena_bytes = "1GiB"
        [policy]
        clients_may_evict_unleased = true
        donation = false
        publishers = ["sglang"]
        [exporter]
        listen = "[::1]:9000"
        [[rank]]
        rank = 3
        gpu = "{GPU_A.upper()}"
        [[rank]]
        rank = 2
        gpu = "MIG-{GPU_A[4:]}"
        """
    )
    assert got.agent == config.AgentConfig(Path("/run/x"), "gpu")
    assert got.loader.command == ("/opt/sglang/bin/python", "-m", "weightcache.loader")
    assert got.loader.environment == {"A": "1"}
    assert (got.loader.timeout_seconds, got.loader.stall_seconds) == (10.0, 2.5)
    assert type(got.loader.timeout_seconds) is float
    assert got.model == config.ModelConfig(("--model-path=/m", "--port", "30000"))
    assert got.memory == MemoryConfig("cuda", 2**30)
    assert got.policy == config.PolicyConfig(True, False, ("sglang",))
    assert got.exporter == config.ExporterConfig("[::1]:9000")
    assert got.ranks == (RankConfig(3, GPU_A), RankConfig(2, f"MIG-{GPU_A[4:]}"))


def test_old_mig_names_are_uuids_too() -> None:
    assert parse(f'[[rank]]\nrank = 0\ngpu = "MIG-{GPU_A}/1/0"').ranks[0].gpu == f"MIG-{GPU_A}/1/0"


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("[memry]", "memry", 'unknown key (did you mean "memory"?)'),
        ("[[ranks]]\nrank = 0", "ranks", 'did you mean "rank"'),
        ("zzzz = 1", "zzzz", "known here: agent, loader, model, deployment, memory, policy, exporter, compiled, rank"),
        ('[memory]\nbakend = "host"', "memory.bakend", 'did you mean "backend"'),
        ('[memory]\n"a b\\u001b" = 1', 'memory."a b\\u001b"', "unknown key"),
        ("[[rank]]\nrank = 0\ngpuu = 1", "rank[0].gpuu", 'did you mean "gpu"'),
        ("[[rank]]\ngpu = ''", "rank[0].rank", "missing"),
        ("[model]", "model.arguments", "missing"),
        ("agent = 1", "agent", "expected a table, got 1"),
        ("model = 1", "model", "expected a table"),
        ("[rank]\nrank = 0", "rank", "write [[rank]]"),
        ("rank = []", "rank", "at least one"),
        ("rank = [1]", "rank[0]", "expected a table, got 1"),
        ('[memory]\nbackend = "gpu"', "memory.backend", 'expected "cuda" or "host", got "gpu"'),
        ('[memory]\nbackend = "Cuda"', "memory.backend", 'did you mean "cuda"'),
        ("[memory]\nbackend = 1", "memory.backend", 'expected "cuda" or "host", got 1'),
        ('[loader]\ncommand = "python3"', "loader.command", 'expected a list such as ["a", "b"], got "python3"'),
        ("[loader]\ncommand = [1]", "loader.command[0]", "expected text in quotes, got 1"),
        ('[loader]\ncommand = [""]', "loader.command[0]", "empty"),
        ('[loader]\ncommand = ["a\\u0000"]', "loader.command[0]", "NUL"),
        ("[loader]\nenvironment = {A = 1}", "loader.environment.A", "expected text in quotes"),
        ("[loader]\nenvironment = 1", "loader.environment", "expected a table"),
        ('[loader.environment]\n"A=B" = "1"', "loader.environment", '"A=B" is no name'),
        ('[loader]\ntimeout_seconds = "1"', "loader.timeout_seconds", "expected a finite number"),
        ("[loader]\ntimeout_seconds = true", "loader.timeout_seconds", "got true"),
        ("[loader]\ntimeout_seconds = inf", "loader.timeout_seconds", "expected a finite number"),
        ("[loader]\ntimeout_seconds = 0", "loader.timeout_seconds", "greater than 0"),
        ("[loader]\nstall_seconds = -1", "loader.stall_seconds", "greater than 0"),
        ("[policy]\ndonation = 1", "policy.donation", "expected true or false, got 1"),
        ('[policy]\npublishers = [""]', "policy.publishers[0]", "empty"),
        ("[exporter]\nlisten = 9464", "exporter.listen", "expected text in quotes, got 9464"),
        ("[exporter]\nlisten = ':9464'", "exporter.listen", "expected HOST:PORT"),
        ("[exporter]\nlisten = '::1:9464'", "exporter.listen", "or [::1]:9464"),
        ("[exporter]\nlisten = 'a:65536'", "exporter.listen", 'got "a:65536"'),
        ("[exporter]\nlisten = 'unix:/a'", "exporter.listen", "expected HOST:PORT"),
        ('[agent]\nruntime_dir = "run"', "agent.runtime_dir", "absolute path"),
        (f"[agent]\nruntime_dir = '/{'x' * 88}'", "agent.runtime_dir", "at most 88 bytes"),
        ("[agent]\nruntime_dir = 1", "agent.runtime_dir", "expected text in quotes"),
        ("[memory]\narena_bytes = -2097152", "memory.arena_bytes", "multiple of 2 MiB"),
        ("[memory]\narena_bytes = 1000", "memory.arena_bytes", "multiple of 2 MiB"),
        ('[memory]\narena_bytes = "3MiB"', "memory.arena_bytes", "multiple of 2 MiB, got 3145728"),
        ('[memory]\narena_bytes = "1GB"', "memory.arena_bytes", 'such as "1GiB", got "1GB"'),
        ("[memory]\narena_bytes = true", "memory.arena_bytes", 'such as "1GiB", got true'),
        ('[memory]\narena_bytes = "999TiB"', "memory.arena_bytes", "more than any device"),
        ("[[rank]]\nrank = -1", "rank[0].rank", "expected 0 to 65535, got -1"),
        ("[[rank]]\nrank = true", "rank[0].rank", "expected a whole number, got true"),
        ("[[rank]]\nrank = 0", "rank[0].gpu", "`nvidia-smi -L` prints the UUIDs"),
        ("[[rank]]\nrank = 0\ngpu = 0", "rank[0].gpu", "expected text in quotes, got 0"),
        ("[[rank]]\nrank = 0\ngpu = '0'", "rank[0].gpu", "whole UUID"),
        (f"[[rank]]\nrank = 0\ngpu = '{GPU_A[:12]}'", "rank[0].gpu", "whole UUID"),
        (f"[[rank]]\nrank = 0\ngpu = '{GPU_A}'\n[[rank]]\nrank = 0\ngpu = '{GPU_B}'", "rank[1].rank", "twice"),
        (f"[[rank]]\nrank = 0\ngpu = '{GPU_A}'\n[[rank]]\nrank = 1\ngpu = '{GPU_A.upper()}'", "rank[1].gpu", "one GPU"),
        (f"[memory]\nbackend = 'host'\n[[rank]]\nrank = 0\ngpu = '{GPU_A}'", "rank[0].gpu", "host backend uses no GPU"),
        ("[model]\narguments = ['--model', 'x']", "loader.command", "no command to load it"),
        (MODEL + "[]", "model.arguments", "--model-path is missing"),
        (MODEL + "['--model-path']", "model.arguments", "has no value"),
        (MODEL + "['--model-path=']", "model.arguments", "has no value"),
        (MODEL + "['--model-path', '--tp']", "model.arguments", "has no value"),
        (MODEL + "['--model', 'x', '--weight-cache-mode=client']", "model.arguments[2]", "set by weightcache itself"),
        (MODEL + "['--model', 'x', '--wcache-wait', '3']", "model.arguments[2]", "set by weightcache itself"),
        (MODEL + "['--model', 'x']", "rank", "needs a [[rank]] with its gpu"),
        ("a = 1\na = 2", "line 2, column 6", "not TOML"),
        ("[memory]\nbackend = cuda", "line 2, column 11", "not TOML: Invalid value"),
        ("\n\nx", "line 3, column 2", "not TOML"),
        ("a = " + "[" * 100_000, "lists or tables", "nested too deeply"),
        ("a = " + "1" * 5000, "not TOML", "digits"),
    ],
)
def test_refusals_name_the_key_and_what_is_wrong(text: str, key: str, says: str) -> None:
    message = refusal(text)
    assert message.startswith(key + (":" if not key.startswith("lists") else "")), message
    assert says in message


def test_a_host_model_needs_no_rank_table() -> None:
    got = parse(MODEL + '["--model", "x"]\n[memory]\nbackend = "host"')
    assert got.ranks == (RankConfig(0),)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read \\(Is a directory\\)"):
        config.load(tmp_path)
    with pytest.raises(ConfigError, match="no usable file name"):
        config.load(Path("a\0b"))
    with pytest.raises(ConfigError, match="larger than"):
        config.load(Path("/dev/zero"))
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"# fine\n# \xff\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: line 2: a byte that is no UTF-8"):
        config.load(bad)
    odd = tmp_path / "a\x1bb.toml"
    odd.write_text("x")
    with pytest.raises(ConfigError) as caught:
        config.load(odd)
    assert "\x1b" not in caught.value.message


def test_no_path_means_the_system_file_or_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CONFIG_FILE", tmp_path / "w.toml")
    assert config.load(None) == Config()
    (tmp_path / "w.toml").write_text('[memory]\nbackend = "host"')
    assert config.load(None) == Config(memory=MemoryConfig("host"), path=tmp_path / "w.toml")


def test_the_reader_imports_nothing_heavy() -> None:
    code = (
        "import sys, weightcache.config; "
        "print(sorted(m for m in sys.modules if m in ('tomlkit', 'argparse', 'socket', 'asyncio', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
