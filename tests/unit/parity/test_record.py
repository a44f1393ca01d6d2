"""Writing evidence: whole or not at all, and nothing that another comparison wrote is lost."""

from __future__ import annotations

import multiprocessing
import os
import stat
import tempfile
from pathlib import Path

import pytest

from weightcache.engine import evidence
from weightcache.errors import ConfigError


def methods(path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv(evidence.VARIABLE, str(path))
    return {proof.method for proof in evidence.all_known()}


@pytest.mark.parametrize("call", ["mkstemp", "fchmod", "rename"])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "evidence.toml"
    evidence.record(path, ["A"], "0.5", "9.0", "run")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    owner = {"mkstemp": tempfile, "fchmod": os, "rename": Path}[call]
    with monkeypatch.context() as failing:
        failing.setattr(owner, call, fail)
        with pytest.raises(ConfigError, match="No space left on device"):
            evidence.record(path, ["B"], "0.5", "9.0", "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["evidence.toml"]
    assert "B" not in methods(path, monkeypatch)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def _record(path: Path, first: int) -> None:
    for number in range(first, first + 20):
        evidence.record(path, [f"M{number}"], "0.5", "9.0", "run")


def test_of_several_at_once_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evidence.toml"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_record, args=(path, first)) for first in (0, 20, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert methods(path, monkeypatch) >= {f"M{number}" for number in range(60)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["evidence.toml"]


def test_any_text_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evidence.toml"
    evidence.record(path, ['é\U0001f600\x7f\x00\n"\\'], "0.5", "9.0", "/models/\udcff")
    assert 'é\U0001f600\x7f\x00\n"\\' in methods(path, monkeypatch)


def test_a_file_that_loaders_could_not_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "evidence.toml"
    with pytest.raises(ConfigError, match="loaders read no more than"):
        evidence.record(path, ["M" * (1 << 20)], "0.5", "9.0", "run")
    assert not path.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        evidence.check_writable(tmp_path / "no" / "evidence.toml")
    with pytest.raises(ConfigError, match="cannot be written"):
        evidence.record(tmp_path / "no" / "evidence.toml", ["M"], "0.5", "", "run")
