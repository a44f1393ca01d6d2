"""What the launcher says when its server serves, without a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.starts.made import MAIN, ORIGIN, Trace, usual
from weightcache.engine.directive import Milestone
from weightcache.launch import served
from weightcache.starts import reading
from weightcache.starts.recorder import Recorder


def news(where: Path, number: int) -> list[str]:
    path = usual().write(where, number)
    return served.news(Milestone(MAIN, "serving", ORIGIN + 22.5), Recorder(path, began=ORIGIN))


def test_a_start_is_compared_with_the_last_one_like_it(tmp_path: Path) -> None:
    usual(imports=3.0).write(tmp_path, 1)
    Trace().write(tmp_path, 2)
    assert news(tmp_path, 3)[1:] == [
        "slower than start 1: imports 16.0 s (was 6.0); `wcache starts show 3` draws it"
    ]  # fmt: skip


def test_only_the_newest_traces_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual(imports=3.0).write(tmp_path, 1)
    for number in range(2, 40):
        Trace().write(tmp_path, number)
    looked, read = [], reading.read
    monkeypatch.setattr(reading, "read", lambda where, number: looked.append(number) or read(where, number))
    assert len(news(tmp_path, 40)) == 1
    assert sorted(set(looked)) == list(range(31, 41))
