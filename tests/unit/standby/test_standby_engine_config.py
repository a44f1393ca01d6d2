"""/etc/weightcache/engines/NAME.toml: what is read, and what is refused in one sentence."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from weightcache.errors import ConfigError, UsageError
from weightcache.launch import arguments, slots
from weightcache.standby import engine_config
from weightcache.standby.engine_config import EngineConfig

GOOD = '[engine]\narguments = ["--model-path", "/m", "--port", "30000"]\n'


def parse(text: str) -> EngineConfig:
    return engine_config.parse(text, "e", Path("/etc/e.toml"))


def with_arguments(words: str, more: str = "") -> str:
    listed = ", ".join(f'"{word}"' for word in words.split())
    return f"[engine]\narguments = [{listed}]\n{more}"


def test_the_defaults() -> None:
    config = parse(GOOD)
    assert (config.name, config.listen, config.model) == ("e", "127.0.0.1:30000", "/m")
    assert config.sglang == ("--model-path", "/m", "--port", "30000", "--host", "127.0.0.1")
    engine, standby = config.engine, config.standby
    assert (engine.priority, engine.python, engine.on_mismatch, engine.without) == (0, "", "error", ())
    assert engine.wait_seconds == 600.0
    assert (standby.hang_seconds, standby.drain_seconds, standby.own_seconds) == (60.0, 30.0, 60.0)
    assert standby.unproven is False


def test_everything_said() -> None:
    config = parse(
        with_arguments("--model /m")
        + 'listen = "[::1]:8000"\npriority = -3\npython = "/p"\non_mismatch = "fallback"\nwithout = ["graphs"]\n'
        'environment = { A = "1" }\n[standby]\nhang_seconds = 30\ndrain_seconds = 0\nown_seconds = 0.5\n'
        "unproven = true\n"
    )
    assert config.sglang == ("--model", "/m", "--host", "::1", "--port", "8000")
    assert (config.host, config.port, config.listen) == ("::1", 8000, "[::1]:8000")
    assert config.engine.without == ("graphs",)
    assert config.engine.environment == {"A": "1"}
    assert config.standby.own_seconds == 0.5
    assert config.standby.unproven


def test_its_digest_changes_with_whatever_may_need_memory() -> None:
    texts = [
        with_arguments("--model /m --port 1"),
        with_arguments("--model /m --port 1 --max-loras-per-batch 4"),
        with_arguments("--model /m --port 1", 'environment = { A = "1" }\n'),
        with_arguments("--model /m --port 1", 'environment = { A = "2" }\n'),
        with_arguments("--model /m --port 1", 'python = "/p"\n'),
        with_arguments("--model /m --port 1", 'without = ["graphs"]\n'),
    ]
    assert len({parse(text).digest for text in texts}) == len(texts)
    same = with_arguments("--model /m --port 1", "priority = 3\n[standby]\ndrain_seconds = 1\n")
    assert parse(same).digest == parse(texts[0]).digest


def test_what_is_said_twice_is_passed_on_once() -> None:
    config = parse(with_arguments("--model /m --host=0.0.0.0 --po 8000", 'listen = "0.0.0.0:8000"\n'))
    assert config.sglang == ("--model", "/m", "--host=0.0.0.0", "--po", "8000")


def test_the_largest_numbers_can_be_lived_with() -> None:
    table = "hang_seconds = 86400\ndrain_seconds = 86400\nown_seconds = 3600\nreserve_gigabytes = 65536\n"
    config = parse(GOOD + f"priority = -1000000\nwait_seconds = 86400\n[standby]\n{table}kv_gigabytes = 65536\n")
    limits = slots.limits(config)
    assert (limits.hang, limits.drain, limits.own) == (86400, 86400, 3600)
    assert limits.reserve_bytes == limits.kv_bytes == 2**46
    for seconds in (limits.hang, limits.drain + limits.margin, limits.own, limits.start):
        assert seconds * 1000 < 2**31, "poll(2) takes milliseconds in an int"


@pytest.mark.parametrize("seconds", [0, 600, 7200])
def test_a_start_may_take_longer_when_it_may_wait_longer(seconds: int) -> None:
    assert slots.limits(parse(GOOD + f"wait_seconds = {seconds}\n")).start == 1800 + seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "engine: this table is missing"),
        ("[engin]\n", 'engin: unknown key (did you mean "engine"?)'),
        ("[engine]\n", "engine.arguments: this key is missing"),
        (GOOD + "lisen = 1\n", 'engine.lisen: unknown key (did you mean "listen"?)'),
        (GOOD + "[standby]\nhang_second = 1\n", 'did you mean "hang_seconds"?'),
        (GOOD + "[standby]\nhang_seconds = 29\n", "standby.hang_seconds: must be 30 or greater"),
        (GOOD + "[standby]\ndrain_seconds = -1\n", "standby.drain_seconds: must be 0 or greater"),
        (GOOD + "[standby]\nown_seconds = 0\n", "standby.own_seconds: must be greater than 0"),
        (GOOD + "[standby]\nreserve_gigabytes = -1\n", "standby.reserve_gigabytes: must be 0 or greater"),
        (GOOD + "wait_seconds = -1\n", "engine.wait_seconds: must be 0 or greater"),
        (GOOD + "wait_seconds = 86400.5\n", "engine.wait_seconds: must be 86400 or less, got 86400.5"),
        (GOOD + "[standby]\nhang_seconds = 1e300\n", "standby.hang_seconds: must be 86400 or less, got 1e+300"),
        (GOOD + "[standby]\ndrain_seconds = 86401\n", "standby.drain_seconds: must be 86400 or less"),
        (GOOD + "[standby]\nown_seconds = 3_000_000\n", "standby.own_seconds: must be 3600 or less, got 3000000.0"),
        (GOOD + "[standby]\nreserve_gigabytes = 1e300\n", "standby.reserve_gigabytes: must be 65536 or less"),
        (GOOD + "[standby]\nkv_gigabytes = 65537\n", "standby.kv_gigabytes: must be 65536 or less"),
        *(
            (GOOD + f"[standby]\n{name} = {value}\n", f"standby.{name}: expected a finite number")
            for name in ("hang_seconds", "drain_seconds", "own_seconds", "reserve_gigabytes", "kv_gigabytes")
            for value in ("nan", "-inf", "inf", "1" + "0" * 400, "0x" + "f" * 5000)
        ),
        (GOOD + "priority = 1000001\n", "engine.priority: must be from -1000000 to 1000000, got 1000001"),
        (GOOD + "priority = -1000001\n", "engine.priority: must be from -1000000 to 1000000"),
        (GOOD + f"priority = 0x{'f' * 5000}\n", "engine.priority: must be from -1000000 to 1000000, got a number of"),
        (GOOD + 'priority = "high"\n', "engine.priority: expected a whole number"),
        (GOOD + 'without = ["weights"]\n', "engine.without[0]: expected"),
        (GOOD + 'on_mismatch = "disk"\n', "engine.on_mismatch: expected"),
        (GOOD + 'python = "python3"\n', "engine.python: expected an absolute path"),
        (GOOD + 'environment = { "A=" = "1" }\n', "no name for an environment variable"),
        (GOOD + 'listen = "here"\n', "engine.listen: expected HOST:PORT"),
        (GOOD + 'listen = "127.0.0.1:0"\n', "engine.listen: 0 is no port"),
        (GOOD + 'listen = "127.0.0.1:30001"\n', 'the arguments say --port "30000", and this says "30001"'),
        (with_arguments("--port 1 --model m --host ::1", 'listen = "[::2]:1"\n'), 'say --host "::1", and this says'),
        (with_arguments("--model m --port 1 --kv-events-config {}"), "--kv-events-config names a port that both"),
        (
            with_arguments("--model m --port 1 --load-publish-endpoint auto"),
            "--load-publish-endpoint makes both engines",
        ),
        (with_arguments("--model m --port 1 --load-pub=tcp://*:6000"), "--load-publish-endpoint makes both engines"),
        (with_arguments("--model m --port 1 --gated-launch-port 5"), "--gated-launch-port names a port that both"),
        (with_arguments("--model m --port 1 --grpc-port 5"), "--grpc-port names a port that both"),
        (with_arguments("--model m --port 1 --warmups voice_chat"), "--warmups runs requests before"),
        (with_arguments("--port 1"), "--model-path is missing"),
        (with_arguments("--model m"), "--port is missing"),
        (with_arguments("--model m --port 0"), '--port "0" is no port'),
        (with_arguments("--model m --port x"), '--port "x" is no port'),
        (with_arguments("--model m --port 65536"), "is no port"),
        (with_arguments("--model m --port 1 --host localhost"), "a socket unit takes IP addresses"),
        (with_arguments("--model m", 'listen = "localhost:1"\n'), "engine.listen: a socket unit takes IP addresses"),
        (with_arguments("--model m --port 1 --wcache-restart"), '"--wcache-restart" is set by weightcache itself'),
        (with_arguments("--model m --port 1 --weight-cache-mode off"), "is set by weightcache itself"),
        (with_arguments("--model m --port 1 --tokenizer-worker-num 2"), "--tokenizer-worker-num binds the port"),
        (with_arguments("--model m --port 1 --enable-http2"), "--enable-http2 binds a port"),
        (with_arguments("--model m --port 1 --grpc-mode"), "gRPC"),
        (with_arguments("--model m --port 1 --nnodes 2"), "with --nnodes the engine is on several hosts"),
        (with_arguments("--model m --port 1 --dp 2 --enable-dp-attention"), "--enable-dp-attention makes both"),
        (with_arguments("--model m --port 1 --nccl-port 5"), "--nccl-port names a port"),
        (with_arguments("--model m --port 1 --dist-init-addr a:5"), "--dist-init-addr names a port"),
        (GOOD + 'environment = { SGLANG_RUST_SERVER = "1" }\n', "SGLANG_RUST_SERVER binds a port"),
        ("[engine\n", "not TOML"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.message.startswith("/etc/e.toml: ")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_files_are_found_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCACHE_ENGINES_DIR", str(tmp_path))
    assert engine_config.names() == ()
    for name in ("b.toml", "a.toml", ".hidden.toml", "a.toml~", "note.txt"):
        (tmp_path / name).write_text(GOOD)
    assert engine_config.names() == ("a", "b")
    assert engine_config.load("b").path == tmp_path / "b.toml"
    with pytest.raises(ConfigError, match=r"c\.toml: there is no such file"):
        engine_config.load("c")
    with pytest.raises(UsageError, match="cannot name an engine"):
        engine_config.load("../a")
    (tmp_path / "no name.toml").touch()
    with pytest.raises(ConfigError, match=r"no name\.toml: .*cannot name an engine"):
        engine_config.names()


def test_the_words_are_the_launchers() -> None:
    assert typing.get_args(engine_config.Lever) == typing.get_args(arguments.Lever)
    assert typing.get_args(engine_config.OnMismatch) == typing.get_args(arguments.OnMismatch)
