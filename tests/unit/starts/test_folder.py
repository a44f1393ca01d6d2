"""Where traces are, which are kept, and what happens when there is no room for them."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from tests.unit.starts.made import usual
from weightcache.starts import folder, reading
from weightcache.starts.recorder import Recorder


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTCACHE_STATE_DIR", str(tmp_path))
    return tmp_path / "starts"


def opened(number: int = 0) -> Recorder:
    return Recorder.open(f"/models/{number}", ("--model-path", "a"), ("caches",))


def test_a_start_is_recorded_for_its_user_alone(where: Path) -> None:
    with opened() as recorder:
        assert recorder.problem == ""
        assert recorder.path == where / "000001.jsonl"
        assert where.stat().st_mode & 0o777 == 0o700
        assert recorder.path.stat().st_mode & 0o777 == 0o600
        recorder.attempt()
        recorder.weights(0, "target", "attached", {"map": 1.0})
        recorder.weights(0, "target", "explained", None)
        found = reading.read(where, 1)
        assert found is not None
        assert found.live
        recorder.ended(-9)
    found = reading.read(where, 1)
    assert found is not None
    assert (found.live, found.status, found.outcome) == (False, -9, "attached")
    assert found.weights[0].milliseconds == {"map": 1.0}
    assert [entry.outcome for entry in found.weights] == ["attached"]


def test_the_newest_are_kept_and_those_in_use(where: Path) -> None:
    first = opened()
    for number in range(folder.KEPT + 10):
        opened(number).close()
    kept = folder.numbers(where)
    assert len(kept) == folder.KEPT + 1
    assert kept[0] == first.number == 1
    assert kept[-1] == folder.KEPT + 11
    first.close()
    opened().close()
    assert len(folder.numbers(where)) == folder.KEPT
    assert folder.numbers(where)[0] != 1


def test_other_files_are_left_alone(where: Path) -> None:
    where.mkdir(mode=0o700)
    (where / "000001.jsonl").mkdir()
    (where / "notes.txt").write_text("mine")
    for number in range(folder.KEPT + 5):
        opened(number).close()
    assert (where / "000001.jsonl").is_dir()
    assert (where / "notes.txt").read_text() == "mine"
    assert any(start.number == 1 and start.damaged for start in reading.newest_first(where))


def _open_many(count: int) -> None:
    for number in range(count):
        with opened(number) as recorder:
            if recorder.problem:
                raise AssertionError(recorder.problem)
            recorder.attempt()


def test_several_launches_at_once_have_traces_of_their_own(where: Path) -> None:
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=_open_many, args=(10,)) for _ in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 4
    found = list(reading.newest_first(where))
    assert len(found) == 40
    assert all(start.header is not None and len(start.attempts) == 1 and not start.damaged for start in found)


def test_no_place_for_a_trace_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEIGHTCACHE_STATE_DIR", str(tmp_path / "file"))
    with opened() as recorder:
        assert recorder.problem.startswith("this start leaves no trace: ")
        assert str(tmp_path / "file") in recorder.problem
        assert recorder.trace == ""
        recorder.attempt()
        recorder.weights(0, "target", "disk", None)
        recorder.ended(0)


def test_a_folder_that_others_can_write_is_refused(where: Path) -> None:
    where.mkdir()
    where.chmod(0o777)
    with opened() as recorder:
        assert "can be written by others" in recorder.problem
    assert list(where.iterdir()) == []


def test_a_disk_that_is_full_leaves_no_empty_trace(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.starts.record.os.write", lambda fd, data: len(data) // 2)
    with opened() as recorder:
        assert "takes no more" in recorder.problem
    assert folder.numbers(where) == []


def test_a_trace_that_is_gone_or_no_file_is_no_error(where: Path, tmp_path: Path) -> None:
    assert reading.read(where, 1) is None
    assert list(reading.newest_first(where)) == []
    usual().write(where, 3)
    (where / "000004.jsonl").symlink_to(where / "000003.jsonl")
    os.mkfifo(where / "000005.jsonl")
    assert [(start.number, start.header is not None) for start in reading.newest_first(where)] == [
        (5, False), (4, False), (3, True),
    ]  # fmt: skip
