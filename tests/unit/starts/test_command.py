"""`wcache starts`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.starts.made import ORIGIN, Trace, usual
from weightcache.cli.main import main
from weightcache.starts.recorder import Recorder


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTCACHE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "starts"


def test_the_list(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual(imports=3.0).write(where, 1)
    usual(outcome="disk").write(where, 2)
    usual().write(where, 3)
    (where / "000004.jsonl").write_bytes(b"\x00garbage\n")
    usual(ended=False).write(where, 5)
    assert main(["starts"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "START", "WHEN", "MODEL", "WORKERS", "WEIGHTS", "TOKEN", "SERVING", "SLOWER", "STATE"
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0].endswith("attached  12.0 s   12.5 s  -        exit 0")
    assert rows[1].endswith("disk      22.0 s   22.5 s  -        exit 0")
    assert rows[2].endswith("attached  22.0 s   22.5 s  imports  exit 0")
    assert rows[3].endswith("damaged")
    assert rows[4].endswith("lost")


def test_the_list_for_programs(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual(imports=3.0).write(where, 1)
    usual().write(where, 2)
    assert main(["starts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    first, second = found["starts"]
    assert first["compared_with"] is None
    assert second["compared_with"] == 1
    assert second["slower"] == [{"phase": "imports", "seconds": 16.0, "before": 6.0}]
    assert sum(second["phases"].values()) == pytest.approx(second["serving"])
    assert (second["warm_up_token"], second["first_token"], second["status"]) == (22.0, 77.5, 0)


@pytest.mark.parametrize("number", [["2"], []])
def test_one_start(where: Path, capsys: pytest.CaptureFixture[str], number: list[str]) -> None:
    usual(imports=3.0).write(where, 1)
    usual().write(where, 2)
    assert main(["starts", "show", *number, "--ascii"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("start 2, ")
    assert "serving after 22.5 s (first token after 22.0 s): launcher 0.5, imports 16.0" in text
    assert "slower than start 1: imports 16.0 s (was 6.0)" in text
    assert "rank 0: attached (milliseconds: map 2, bind 2)" in text
    assert "scheduler rank 0 (process 12, cold)" in text
    assert max(map(len, text.splitlines()[5:])) <= 80
    assert text.isascii()


def test_one_start_for_programs(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual().write(where, 1)
    assert main(["starts", "show", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert [process["role"] for process in found["processes"]] == ["main", "scheduler", "detokenizer"]
    graphs = [entry for entry in found["processes"][1]["phases"] if entry["name"] == "decode graph"]
    assert sorted(entry["size"] for entry in graphs) == [1, 2, 4]
    assert found["ranks"][0]["milliseconds"] == {"map": 1.5, "bind": 2.5}


def test_states_of_a_start_that_goes_on(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder.open("/models/a", (), ()) as recorder:
        assert main(["starts"]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith("starting")
        assert recorder.path is not None
        with recorder.path.open("ab") as file:
            now = time.monotonic() - ORIGIN
            file.write(b"".join(Trace().process(11, "main", now, now).point(now, 11, "serving").lines[1:]))
        assert main(["starts"]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith("serving")


def test_without_any_start(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["starts"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["starts", "show"]) == 2
    assert "no start is kept" in capsys.readouterr().err


def test_a_start_that_is_not_there(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual().write(where, 7)
    assert main(["starts", "show", "3"]) == 2
    assert "there is no start 3: starts 7 to 7 are kept" in capsys.readouterr().err


def test_a_directory_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["starts", "--dir", str(tmp_path / "file")]) == 70
    assert "cannot be read" in capsys.readouterr().err
    assert main(["starts", "show", "--dir", str(tmp_path / "none")]) == 2


def test_output_that_knows_no_blocks_gets_ascii(
    where: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual().write(where, 1)
    monkeypatch.setattr("weightcache.cli.starts._shows_blocks", lambda: False)
    assert main(["starts", "show"]) == 0
    assert capsys.readouterr().out.isascii()
