"""A comparison that is ended leaves no process and no file, in whatever it was busy with."""

from __future__ import annotations

import argparse
import os
import pwd
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weightcache.loader import load
from weightcache.parity import ending

MARK = "WCTEST_MARK"
PHASES = {
    "starting": ("silent", "wcache-parity-*/disk/log", "helper"),
    "serving": ("slow", "wcache-parity-*/disk/log", "asked"),
    "loading": ("well", "wcache-*/0.log", "fake load"),
}
"""How SGLang behaves, and what is where once the comparison is as far."""


@dataclass
class Comparison:
    """Starts the role, or `wcache` around it, in a session and a temporary directory of its own."""

    environment: dict[str, str]
    temporary: Path
    config: Path

    def start(self, phase: str, *command: str) -> subprocess.Popen[str]:
        fake, pattern, sign = PHASES[phase]
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--model-path", "org/m", "--device", "cpu"],
            env={**self.environment, "FAKE": fake},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Python leaves SIGINT alone where it was ignored, as a shell has it for what runs in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        eventually(
            lambda: any(sign in path.read_text() for path in self.temporary.glob(pattern)) or process.poll() is not None
        )
        assert process.poll() is None, process.communicate()
        return process

    def role(self, phase: str) -> subprocess.Popen[str]:
        return self.start(phase, "weightcache.loader", "parity", "--")

    def wcache(self, phase: str) -> subprocess.Popen[str]:
        name = pwd.getpwuid(os.geteuid()).pw_name
        options = ("--config", str(self.config), "parity", "--user", name)
        return self.start(phase, "weightcache.cli", *options, "org/m")

    def processes(self) -> list[int]:
        """All that have this comparison's mark in their environment."""
        mark = f"{MARK}={self.environment[MARK]}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def assert_nothing_left(self) -> None:
        eventually(lambda: not self.processes())
        assert list(self.temporary.iterdir()) == []


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def comparison(environment: dict[str, str], runtime_dir: Path, tmp_path: Path) -> Iterator[Comparison]:
    config = tmp_path / "weightcache.toml"
    config.write_text(f'[loader]\ncommand = ["{sys.executable}", "-m", "weightcache.loader"]\n')
    environment = {**environment, "TMPDIR": str(runtime_dir), MARK: uuid.uuid4().hex}
    result = Comparison(environment, runtime_dir, config)
    yield result
    for pid in result.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_the_role(comparison: Comparison, phase: str, number: signal.Signals) -> None:
    process = comparison.role(phase)
    for another in (number, signal.SIGHUP, number):  # the second and third come while it tidies up
        process.send_signal(another)
        time.sleep(0.02)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"weightcache-loader: ended by {number.name}"
    assert process.returncode == 128 + number
    comparison.assert_nothing_left()


def _terminal(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def _alone(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: process.send_signal(number)


@pytest.mark.parametrize(
    ("phase", "end", "status"),
    [
        ("serving", _terminal, 130),
        ("starting", _alone(signal.SIGINT), 130),
        ("loading", _alone(signal.SIGTERM), 143),
        ("starting", _alone(signal.SIGHUP), 129),
        ("loading", _alone(signal.SIGKILL), -9),
    ],
    ids=["terminal", "INT", "TERM", "HUP", "KILL"],
)
def test_wcache_waits_for_its_role(
    comparison: Comparison, phase: str, end: Callable[[subprocess.Popen[str]], None], status: int
) -> None:
    process = comparison.wcache(phase)
    end(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    comparison.assert_nothing_left()


def test_a_failed_disk_side_leaves_nothing(comparison: Comparison) -> None:
    comparison.environment["FAKE"] = "ends"
    done = subprocess.run(
        [sys.executable, "-m", "weightcache.loader", "parity", "--", "--model-path", "org/m", "--device", "cpu"],
        env=comparison.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "out of memory, says the fake" in done.stderr
    comparison.assert_nothing_left()


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ending, "_asked", 0)
    monkeypatch.setattr(ending, "with_parent", lambda _: None)
    before = {number: signal.getsignal(number) for number in ending.SIGNALS}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_signal_between_waits_is_not_lost() -> None:
    tidied = []

    def comparison() -> None:
        with ending.orderly():
            try:
                signal.raise_signal(signal.SIGTERM)
                tidied.append("went on")
                with ending.wait():
                    pytest.fail("nothing is waited for any more")
            finally:
                signal.raise_signal(signal.SIGINT)
                tidied.append("tidied up")

    with pytest.raises(ending.Ended) as raised:
        comparison()
    assert tidied == ["went on", "tidied up"]
    assert raised.value.status == 128 + signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)  # one more, after it


@pytest.mark.usefixtures("handlers")
def test_a_signal_after_the_last_wait_and_one_that_is_ignored() -> None:
    def comparison() -> None:
        with ending.orderly():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(ending.Ended, match="SIGINT"):
        comparison()


def test_the_comparisons_own_agent_may_publish_anything_and_says_so(comparison: Comparison) -> None:
    """Its configuration says it, and no environment."""
    comparison.environment["WEIGHTCACHE_UNPROVEN"] = "refuse"
    process = comparison.role("loading")
    log = next(comparison.temporary.glob("wcache-*/0.log")).read_text()
    assert "methods without evidence are published: this is for a comparison" in log
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_nothing_is_said_where_evidence_is_required(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WEIGHTCACHE_UNPROVEN", raising=False)
    monkeypatch.setattr(load, "_launch", lambda *_: 0)
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    assert load.run(parser.parse_args(["--backend", "host", "--socket-dir", "/", "--", "--model-path", "org/m"])) == 0
    assert capfd.readouterr().err == ""
