"""`wcache rehearse` over a stand-in for SGLang: what it starts, asks, leaves and refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import weightcache
from weightcache.cli import rehearse_engine, rehearse_room
from weightcache.cli.rehearse_room import Room
from weightcache.errors import NoRoom, UsageError
from weightcache.protocol import RankReport

SERVER = Path(__file__).with_name("rehearsed_server.py")
MODEL = (
    '[model]\narguments = ["--model-path", "/models/small", "--device", "cpu", "--port", "1", "--api-key", "secret"]\n'
)


@dataclass
class Rehearsal:
    """The command in a process of its own, since it takes signals."""

    host: Any
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def server(self, **options: Any) -> None:
        self.environment["SERVER"] = json.dumps({"folder": str(self.folder), **options})

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "weightcache.cli", "--config", str(self.host.config)]
        command += ["--runtime-dir", str(self.host.run), "rehearse", *options]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *options: str) -> tuple[int, list[str], str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err

    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        file = self.folder / "asked"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def seen(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "seen").read_text()))

    def left(self) -> list[str]:
        """Processes that have this test's variables."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if os.fsencode(self.environment["SERVER"]) in (process / "environ").read_bytes():
                        found.append((process / "cmdline").read_bytes().decode())
                except OSError:
                    continue
        return found


@pytest.fixture
def rehearsal(host, make_status: Callable[..., Any], tmp_path: Path) -> Rehearsal:
    folder = tmp_path / "work"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    python.chmod(0o755)
    host.config.write_text(
        f'{host.config.read_text()}[loader]\ncommand = ["{python}", "-m", "weightcache.loader"]\n{MODEL}'
    )
    host.agent(0, RankReport(make_status()))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "WEIGHTCACHE", "TRITON"))
    }
    environment = {
        **kept, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(Path(weightcache.__file__).parent.parent),
        "WEIGHTCACHE_CACHE_DIR": str(folder / "cache"), "WEIGHTCACHE_STATE_DIR": str(folder / "state"),
    }  # fmt: skip
    made = Rehearsal(host, folder, environment)
    made.server()
    return made


def python_of(rehearsal: Rehearsal) -> tuple[str, str]:
    return ("--python", str(rehearsal.folder / "python"))


def test_it_starts_asks_ends_and_says_what_was_compiled(rehearsal):
    rehearsal.server(kernels=["a", "b"])
    status, out, err = rehearsal.run(*python_of(rehearsal))
    assert (status, err) == (0, "")
    said = [line.removeprefix("rehearse: ") for line in out]
    assert said[0] == "starting SGLang with at most 20480 tokens of KV memory"
    assert any(line.startswith("rank 0: attached set 1a2b1a2b") for line in said)
    assert [line.partition(":")[0] for line in said[-4:-1]] == [
        "a short prompt", "a prompt of 576 tokens", "8 prompts at once"
    ]  # fmt: skip
    assert said[-1].startswith("compiled 2 files, ")
    assert rehearsal.left() == []
    assert not list(rehearsal.folder.glob("wcache-*"))

    assert [path for path, _ in rehearsal.asked()] == ["/generate"] * 3
    prompts = [body["input_ids"] for _, body in rehearsal.asked()]
    assert [len(prompt) for prompt in prompts] == [16, 576, 8]
    seen = rehearsal.seen
    assert seen["levers"] == ["caches"]
    assert seen["on_mismatch"] == "error"
    arguments = seen["arguments"]
    assert "secret" not in str(arguments)
    assert arguments.count("--port") == 1
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert json.loads(seen["yaml"]["api-key"]) == json.loads(seen["yaml"]["admin-api-key"]) != "secret"

    rehearsal.server(kernels=["a", "b"])
    status, out, _ = rehearsal.run(*python_of(rehearsal))
    assert (status, len(rehearsal.asked())) == (0, 6)
    assert out[-1].startswith("rehearse: nothing had to be compiled")


def test_once_is_once_for_the_same_arguments_in_the_same_environment(rehearsal):
    assert rehearsal.run(*python_of(rehearsal), "--once")[0] == 0
    status, out, err = rehearsal.run(*python_of(rehearsal), "--once")
    assert (status, err) == (0, "")
    assert out == ["rehearse: the same was rehearsed in this environment before: nothing to do"]
    assert len(rehearsal.asked()) == 3
    other = ("--", "--model-path", "/models/small", "--device", "cpu", "--context-length", "512")
    assert rehearsal.run(*python_of(rehearsal), "--once", *other)[0] == 0
    assert len(rehearsal.asked()) == 6
    shutil.rmtree(rehearsal.folder / "cache")
    status, out, _ = rehearsal.run(*python_of(rehearsal), "--once", "--json", *other)
    assert (status, json.loads("".join(out))["outcome"]) == (0, "nothing")
    assert len(rehearsal.asked()) == 9


def test_the_server_ends_with_the_command_however_that_ends(rehearsal):
    for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)):
        rehearsal.server(stubborn=number != signal.SIGINT)
        (rehearsal.folder / "seen").unlink(missing_ok=True)
        process = rehearsal.start(*python_of(rehearsal), "--", "--model-path", "/models/small", "--device", "cpu")
        deadline = time.monotonic() + 20
        while not (rehearsal.folder / "seen").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == status
        while rehearsal.left():
            assert time.monotonic() < deadline + 60, rehearsal.left()
            time.sleep(0.05)


def test_a_server_that_fails_is_an_error_with_its_last_words(rehearsal):
    rehearsal.server(exit=3)
    status, _, err = rehearsal.run(*python_of(rehearsal))
    assert status == 69
    assert "no rehearsal: WARNING: the server ended without a word from weightcache inside it" in err
    assert "; the last line of a log; " in err
    rehearsal.server(status=500)
    status, _, err = rehearsal.run(*python_of(rehearsal))
    assert status == 1
    assert "/generate answered 500" in err
    assert not list(rehearsal.folder.glob("cache/compiled/*/rehearsed.json"))
    assert rehearsal.left() == []


def test_a_server_that_does_not_answer_in_time_is_ended(rehearsal):
    rehearsal.folder.joinpath("python").write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && exec sleep 60\nexec {sys.executable} "$@"\n'
    )
    status, _, err = rehearsal.run(*python_of(rehearsal), "--seconds", "2")
    assert status == 1
    assert "did not answer within 2 s" in err
    assert rehearsal.left() == []


@pytest.mark.parametrize(
    ("state", "status"), [("empty", 1), ("failed", 1), ("drained", 1), ("degraded", 1), ("loading", 75)]
)
def test_without_weights_nothing_is_started(host, rehearsal, make_status, state, status):
    host.agents.pop().close()
    for path in host.run.iterdir():
        path.unlink()
    host.agent(0, RankReport(make_status(state=state)))
    found = rehearsal.run(*python_of(rehearsal), "--wait", "1.5" if state == "loading" else "0")
    assert found[:2] == (status, [])
    assert f"rank 0 is {state}" in found[2]
    assert not (rehearsal.folder / "seen").exists()


def test_without_an_agent_nothing_is_started_either(host, rehearsal):
    host.agents.pop().close()
    status, out, err = rehearsal.run(*python_of(rehearsal))
    assert (status, out) == (69, [])
    assert "rank 0" in err


def test_command_lines_that_make_no_sense(host, rehearsal):
    assert "several nodes" in rehearsal.run("--", "--model-path", "m", "--tp-size", "2", "--nnodes", "2")[2]
    assert "--model-path is missing" in rehearsal.run("--", "--tp-size", "2")[2]
    assert "stand after --" in rehearsal.run("model")[2]
    assert "expected seconds" in rehearsal.run("--seconds", "-1")[2]
    host.config.write_text("")
    assert "no [model] is configured" in rehearsal.run()[2]


def test_tokens_that_fit_or_the_numbers_of_why_not():
    gigabyte = 1 << 30
    assert rehearse_room.tokens(None, "cuda", 1 << 20) == 20480
    assert rehearse_room.tokens(Room("GPU a", 100 * gigabyte), "cuda", 1 << 20) == 20480
    assert rehearse_room.tokens(Room("GPU a", 15 * gigabyte), "cuda", 1 << 20) == 10240
    assert rehearse_room.tokens(Room("GPU a", 15 * gigabyte), "cuda", 1 << 20, 500) == 500
    with pytest.raises(NoRoom, match=r"GPU a has 1\.07 GB free, and a rehearsal takes about 6\.98 GB there"):
        rehearse_room.tokens(Room("GPU a", gigabyte), "cuda", 1 << 20)
    with pytest.raises(NoRoom):
        rehearse_room.tokens(Room("GPU a", 15 * gigabyte), "cuda", 1 << 20, 100_000)
    with pytest.raises(NoRoom):  # all ranks in one memory
        rehearse_room.tokens(Room("this host", 15 * gigabyte, 8), "host", 1 << 10)


def test_too_little_memory_is_refused_before_anything_starts(rehearsal):
    status, out, err = rehearsal.run(
        *python_of(rehearsal), "--", "--model-path", "m", "--device", "cpu", "--max-total-tokens", "999999999"
    )
    assert (status, out) == (1, [])
    assert "this host has" in err
    assert not (rehearsal.folder / "seen").exists()


def test_free_memory_of_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = tmp_path / "nvidia-smi"

    def says(text: str) -> None:
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        script.chmod(0o755)

    says("GPU-a, 1000\nGPU-b, 500\nGPU-c, 1")
    assert rehearse_room.free_on_gpus({"GPU-a", "gpu-B"}) == Room("GPU GPU-b", 500 << 20)
    assert rehearse_room.free_on_gpus({"GPU-a", "MIG-x"}) is None
    assert rehearse_room.free_on_gpus(set()) is None
    for text in ("", "GPU-a, [N/A]", "GPU-a"):
        says(text)
        assert rehearse_room.free_on_gpus({"GPU-a"}) is None
    script.write_text("#!/bin/sh\nexit 9\n")
    assert rehearse_room.free_on_gpus({"GPU-a"}) is None


def test_free_memory_of_the_host(tmp_path):
    assert (rehearse_room.free_on_host(2) or Room("", 0)).ranks == 2
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    assert rehearse_room.free_on_host(1, tmp_path / "meminfo") == Room("this host", 7 << 10)
    (tmp_path / "meminfo").write_text("MemAvailable:\n")
    assert rehearse_room.free_on_host(1, tmp_path / "meminfo") is None
    assert rehearse_room.free_on_host(1, tmp_path / "none") is None


def test_bytes_of_a_token(tmp_path):
    def of(config: Any, tp_size: int = 1, pp_size: int = 1) -> int:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return rehearse_room.token_bytes(str(tmp_path), tp_size, pp_size)

    llama = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    assert of(llama) == 80 * 2 * 8 * 128 * 2
    assert of(llama, tp_size=8) == 80 * 2 * 1 * 128 * 2
    assert of(llama, tp_size=16, pp_size=2) == 40 * 2 * 1 * 128 * 2
    assert of({"text_config": {**llama, "head_dim": 64}}) == 80 * 2 * 8 * 64 * 2
    assert of({**llama, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, tp_size=8) == 80 * 576 * 2
    for broken in ({}, [], {"num_hidden_layers": "x"}, {**llama, "num_attention_heads": 0}, {"text_config": 3}):
        assert of(broken) == rehearse_room.TOKEN_BYTES
    assert rehearse_room.token_bytes("some/name-on-the-hub") == rehearse_room.TOKEN_BYTES


@pytest.mark.parametrize("longest", [1, 47, 300, 100_000])
def test_no_prompt_is_longer_than_the_server_takes(longest):
    info = {"max_req_input_len": longest, "max_total_num_tokens": 100_000, "chunked_prefill_size": -1}
    for _, body in rehearse_engine._requests(info, True):
        ids = body["input_ids"]
        assert len(ids) <= max(longest - 32, 16)
    assert [name for name, _ in rehearse_engine._requests({"max_req_input_len": "x"}, True)] == [
        "a short prompt", "a prompt of 992 tokens", "8 prompts at once"
    ]  # fmt: skip
    assert all("sampling_params" not in body for _, body in rehearse_engine._requests(info, False))


def test_a_log_is_read_once(tmp_path):
    log = rehearse_engine._Log(tmp_path / "log")
    assert log.new() == []
    with (tmp_path / "log").open("wb") as file:
        for part, lines in ((b"one\ntw", ["one"]), (b"", []), (b"o\r50%\r\xff\n", ["two", "50%", "\ufffd"])):
            file.write(part)
            file.flush()
            assert log.new() == lines
        file.write(b"x" * 10_000 + b"\n" + b"y\n" * 100)
    assert len(log.new()) == 101
    assert list(log.last) == ["y"] * 12


def test_an_operators_config_file_is_taken_along_with_another_key(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("dtype: float16\napi-key: secret\nadmin_api_key: secret\n")
    made = rehearse_engine._with_key(["--config", str(own), "--tp-size", "2"], "k", tmp_path / "made.yaml")
    assert made == ["--config", str(tmp_path / "made.yaml"), "--tp-size", "2"]
    assert (tmp_path / "made.yaml").read_text() == 'dtype: float16\napi-key: "k"\nadmin-api-key: "k"\n'
    assert (tmp_path / "made.yaml").stat().st_mode & 0o777 == 0o600
    assert rehearse_engine._with_key([f"--config={own}"], "k", tmp_path / "again.yaml")[0] == "--config"
    with pytest.raises(UsageError, match="cannot be read"):
        rehearse_engine._with_key(["--config", str(tmp_path / "none")], "k", tmp_path / "third.yaml")


@pytest.mark.parametrize(
    "text", ["{dtype: float16}", "dtype: float16\n...", "---\ndtype: float16", "cuda-graph-bs:\n- 1"]
)
def test_a_config_file_that_no_line_can_be_added_to_is_refused(tmp_path, text):
    (tmp_path / "own.yaml").write_text(f"{text}\n")
    for given in (["--config", str(tmp_path / "own.yaml")], [f"--config={tmp_path}/own.yaml"]):
        with pytest.raises(UsageError, match=r"own\.yaml holds more than lines of key: value"):
            rehearse_engine._with_key(given, "k", tmp_path / "made.yaml")
    assert not (tmp_path / "made.yaml").exists()


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@pytest.fixture
def killed(monkeypatch) -> list[str]:
    """In which state the leader was when its group was killed."""
    states: list[str] = []
    kill = os.killpg

    def note(group: int, number: int) -> None:
        states.append(state(group))
        kill(group, number)

    monkeypatch.setattr(os, "killpg", note)
    return states


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [("", "exit 3", 3), ("", "exec sleep 600", -signal.SIGTERM), ("trap '' TERM;", "sleep 600", -signal.SIGKILL)],
)
def test_a_group_is_killed_while_its_number_is_its_own(monkeypatch, killed, before, after, ends):
    monkeypatch.setattr(rehearse_engine, "END_SECONDS", 0.5)
    process = subprocess.Popen(
        ["sh", "-c", f"{before} sleep 600 & echo $!; {after}"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        held = rehearse_engine.Tree(process.pid)
        if ends == 3:
            assert rehearse_engine.ending.status(process.pid, 10) == 3
        rehearse_engine._end(process, held)
    assert killed == ["Z"]
    assert process.returncode == ends
    deadline = time.monotonic() + 5
    while state(helper) not in ("Z", "X", "gone"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_launcher_that_ends_at_once_is_not_waited_for_before_its_group_is_killed(tmp_path, killed):
    plan = rehearse_engine.Plan(("--model-path", "m"), ("--wcache-no-such-option",), 1, 60.0)
    with pytest.raises(UsageError), rehearse_engine.running(plan, tmp_path, print, str):
        pytest.fail("it cannot answer")
    assert killed == ["Z"]


def test_nobody_is_killed_for_a_child_that_was_waited_for(killed):
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait(10)
    rehearse_engine.ending.kill_group(process.pid)
    assert killed == []
