"""The command lines of the scripts for many kinds of models."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu import parity, parked

SCRIPTS = [parity, parked]


@pytest.mark.parametrize("script", SCRIPTS)
def test_kinds_are_those_that_there_are(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "dense", "what", "moe", "who"])
    with pytest.raises(SystemExit, match="2"):
        script.arguments()
    assert "no such kind: what who" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["script", "dense", "moe"])
    assert script.arguments().kinds == ["dense", "moe"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_results_go_to_the_folder_of_logs(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGS", raising=False)
    monkeypatch.setattr(sys, "argv", ["script"])
    assert script.arguments().out == Path()
    monkeypatch.setenv("LOGS", "/logs")
    assert script.arguments().out == Path("/logs")
    monkeypatch.setattr(sys, "argv", ["script", "--out", "/elsewhere"])
    assert script.arguments().out == Path("/elsewhere")
