"""Recordings: whatever was seen comes back, at its time; what is damaged is one sentence."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.contracts import strategies
from tests.unit.monitor import made
from weightcache import records
from weightcache.errors import UsageError, WeightcacheError
from weightcache.monitor import recording, replay
from weightcache.monitor.recording import Recorded, Recorder
from weightcache.monitor.replay import Replay
from weightcache.monitor.snapshot import SCHEMA, Snapshot


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


def recorded(path: Path, *snapshots: Snapshot) -> Path:
    with Recorder(path) as recorder:
        for one in snapshots:
            recorder.write(one)
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.lists(strategies.values(Snapshot), min_size=1, max_size=3))
def test_any_snapshot_comes_back(tmp_path: Path, snapshots: list[Snapshot]) -> None:
    path = tmp_path / "recording"
    path.unlink(missing_ok=True)
    played = Replay(recorded(path, *snapshots))
    assert played.snapshot() is not None
    assert [played._read(place) for place in range(len(snapshots))] == snapshots
    assert played.last() == snapshots[-1]
    played.close()


def test_a_recording_is_lines_for_this_user_alone(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", made.snapshot(), made.snapshot())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header, *rest = [json.loads(line) for line in lines(path)]
    assert header == {"kind": "weightcache-recording", "schema": SCHEMA}
    assert [next(iter(one)) for one in rest] == ["at", "at"]


def test_each_line_is_written_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as recorder:
        recorder.write(made.snapshot())
        assert len(lines(tmp_path / "r")) == 2


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", made.snapshot())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists, and a recording overwrites nothing"):
        Recorder(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists"):
        Recorder(tmp_path / "link")
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["none/r", ".", "x" * 300])
def test_places_without_a_file(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError):
        Recorder(tmp_path / where)
    with pytest.raises(UsageError):
        Replay(tmp_path / where)


def test_a_full_disk_is_a_sentence_and_looking_goes_on() -> None:
    recorder = Recorder.__new__(Recorder)
    recorder._path = Path("/dev/full")
    recorder._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(WeightcacheError, match="could not be written"):
        recorder.write(made.snapshot())
    source = made.Still(made.snapshot(at=1.0), made.snapshot(at=2.0))
    looking = Recorded(source, recorder, 0.5)
    assert looking.snapshot().at == 1.0
    assert looking.problem
    assert looking.problem.message == "/dev/full could not be written (No space left on device)"
    assert looking.snapshot().at == 2.0
    looking.close()
    assert source.closed


def test_what_is_looked_at_is_recorded_in_its_pace(tmp_path: Path) -> None:
    source = made.Still(*made.numbered([10.0, 10.2, 11.0, 11.1, 11.3, 5.0, 5.1]))
    looking = Recorded(source, Recorder(tmp_path / "r"), 1.0)
    assert looking.changed is None
    for _ in range(4):
        looking.snapshot()
    looking.pace(0.3)
    assert source.paces == [0.3]
    for _ in range(3):
        looking.snapshot()
    looking.close()
    assert [json.loads(line)["at"] for line in lines(tmp_path / "r")[1:]] == [10.0, 11.0, 11.3, 5.0]


def test_a_replay_keeps_time(tmp_path: Path) -> None:
    clock = Clock()
    played = Replay(recorded(tmp_path / "r", *made.numbered([100.0, 101.0, 105.0])), 2.0, clock)
    clock.now += 50  # the first look starts it
    seen = []
    for moment in (0.0, 0.4, 0.5, 2.4, 2.5, 100.0):
        clock.now = 550.0 + moment
        seen.append((played.snapshot().at, played.ended))
    assert seen == [(100, False), (100, False), (101, False), (101, False), (105, True), (105, True)]
    assert played.last().at == 105
    played.pace(3.0)
    played.close()


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = Clock()
    played = Replay(recorded(tmp_path / "r", *made.numbered([100.0, 50.0, 101.0])), 1.0, clock)
    assert played.snapshot().at == 50  # of the same moment, the last one
    clock.now += 1
    assert played.snapshot().at == 101
    played.close()


def damaged(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        Replay(path)
    assert "\n" not in caught.value.message
    return caught.value.message.replace(str(path), "FILE")


def test_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for content in (b"", b"x"):
        path.write_bytes(content)
        assert damaged(path) == "FILE is no recording"
    for content in (b"\n", b"[]\n", b'{"kind": "x"}\n', b"\xff\n", b"[" * 100_000 + b"\n", b"\x1f\x8b\x08\n"):
        path.write_bytes(content)
        assert damaged(path) == "FILE, line 1: this is no recording of wcache-top"


def test_newer_recordings(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text(json.dumps({"kind": recording.KIND, "schema": 2, "more": 1}) + "\n{}\n")
    assert damaged(path) == "FILE, line 1: recorded with schema 2, this wcache-top reads 1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: b"{\n", "no snapshot (Expecting"),
        (lambda line: b"\n", "no snapshot (Expecting value"),
        (lambda line: line.replace(b'"host"', b'"hosts"'), "no snapshot ($: unknown field 'hosts')"),
        (lambda line: b'{"at": 1}\n', "no snapshot ($: field 'host' is missing)"),
        (lambda line: line.replace(b'"580.1"', b"580"), "no snapshot ($.driver: expected text, got 580)"),
        (lambda line: line.replace(b'"580.1"', b"1" * 5000), "no snapshot (Exceeds the limit"),
        (lambda line: b"\x00" + line, "no snapshot ("),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, change: object, words: str) -> None:
    path = recorded(tmp_path / "r", *[made.snapshot() for _ in range(4)])
    content = lines(path)
    content[2] = change(content[2])  # type: ignore[operator]
    path.write_bytes(b"".join(content))
    assert damaged(path).startswith(f"FILE, line 3: {words}")


def test_the_line_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", *made.numbered([1.0, 2.0]))
    with path.open("ab") as file:
        file.write(lines(path)[1][:-20])
    played = Replay(path)
    assert played.last().at == 2.0
    played.close()
    path.write_bytes(b"".join(lines(path)[:1]))
    assert damaged(path) == "FILE holds no snapshot"


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "r", made.snapshot())
    monkeypatch.setattr(replay, "LONGEST_LINE", 100)
    assert damaged(path) == "FILE, line 2: longer than any snapshot"


def test_a_file_that_changes_under_a_replay(tmp_path: Path) -> None:
    clock = Clock()
    path = recorded(tmp_path / "r", *made.numbered([1.0, 2.0]))
    played = Replay(path, 1.0, clock)
    assert played.snapshot().at == 1.0
    os.truncate(path, 10)
    clock.now += 5
    assert played.snapshot().at == 1.0
    played.close()


def test_a_large_recording_takes_little_memory(tmp_path: Path) -> None:
    leases = tuple(made.lease(pid, command="x" * 200) for pid in range(60))
    one = made.snapshot(*[made.view(made.status(rank, sets=(made.weight_set(leases=leases),))) for rank in range(8)])
    line = json.dumps(records.to_plain(one)).encode() + b"\n"
    path = recorded(tmp_path / "r")
    with path.open("ab") as file:
        for _ in range(40):
            file.write(line)
    assert path.stat().st_size > 5 * 2**20
    tracemalloc.start()
    try:
        played = Replay(path)
        played.snapshot()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    played.close()
    assert kept < 2 * 2**20
    assert most < 4 * 2**20
