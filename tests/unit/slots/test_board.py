"""What a slot says of itself, and how promotions are told."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors
from tests.unit.launch.support import eventually
from weightcache.launch.board import Board
from weightcache.launch.promotion import sentence
from weightcache.standby import fence, status
from weightcache.standby.messages import Process
from weightcache.standby.status import Cause, Promotion, SlotStatus

RANKS = (Process(1, 2), Process(3, 4))


@pytest.fixture
def initial() -> SlotStatus:
    return SlotStatus("chat", "a", "starting", 0.0, fence.identify(os.getpid()), listen="127.0.0.1:1")


def opened() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def promotion(cause: Cause = "start") -> Promotion:
    return Promotion(1.0, 0.2149, cause, {"lock": 0.001, "fence": 0.02, "map": 0.17, "accept": 0.004})


def test_what_changes_is_written_and_when_a_role_was_taken_stays(tmp_path: Path, initial: SlotStatus) -> None:
    board = Board(tmp_path / "chat-a.json", initial)
    board.engine_starts()
    assert board.show("starting", None, ()) == "starting"
    first, _ = status.read(tmp_path / "chat-a.json")
    assert first is not None
    assert first.since > 0
    inode = (tmp_path / "chat-a.json").stat().st_ino
    board.show("starting", None, ())
    assert (tmp_path / "chat-a.json").stat().st_ino == inode
    assert board.show("active", RANKS[0], RANKS[1:]).startswith("active since 2")
    second, _ = status.read(tmp_path / "chat-a.json")
    assert second is not None
    assert (second.role, second.main, second.ranks, second.restarts) == ("active", RANKS[0], RANKS[1:], 0)
    assert second.since > first.since
    board.show("active", RANKS[0], RANKS)
    third, _ = status.read(tmp_path / "chat-a.json")
    assert third is not None
    assert third.since == second.since


def test_engines_started_again_are_counted(tmp_path: Path, initial: SlotStatus) -> None:
    board = Board(tmp_path / "chat-a.json", initial)
    for _ in range(3):
        board.engine_starts()
    board.problem = "rank 0 has ended"
    assert board.show("starting", None, ()) == "starting (rank 0 has ended)"
    assert (board.status.restarts, board.status.problem) == (2, "rank 0 has ended")


def test_promotions_outlive_a_launcher(tmp_path: Path, initial: SlotStatus) -> None:
    board = Board(tmp_path / "chat-a.json", initial)
    for _ in range(status.MOST_PROMOTIONS + 5):
        board.promoted(promotion())
    board.promoted(promotion("death"))
    board.show("active", None, ())
    later = Board(tmp_path / "chat-a.json", initial)
    assert later.status.promotions == (*[promotion()] * (status.MOST_PROMOTIONS - 1), promotion("death"))
    later.promoted(promotion("death"))
    assert later.status.promoted == {"start": status.MOST_PROMOTIONS + 5, "death": 2}


def test_what_no_launcher_wrote_is_not_carried_over(tmp_path: Path, initial: SlotStatus) -> None:
    path = tmp_path / "chat-a.json"
    odd = {f"cause {number:04}": number for number in range(5000)}
    status.write(path, replace(initial, promoted={"death": 3, "wake": 0, "start": -1, **odd}))
    written = json.loads(path.read_text())
    written["promotions"] = [{"at": float(n), "seconds": 0.1, "cause": "death"} for n in range(1000)]
    path.write_text(json.dumps(written))
    board = Board(path, initial)
    assert board.status.promoted == {"death": 3}
    assert [one.at for one in board.status.promotions] == list(range(1000 - status.MOST_PROMOTIONS, 1000))


def test_a_full_disk_is_said_once(tmp_path: Path, initial: SlotStatus, capfd: pytest.CaptureFixture[str]) -> None:
    board = Board(tmp_path / "gone" / "chat-a.json", initial)
    board.show("starting", None, ())
    board.show("standby", None, ())
    assert capfd.readouterr().err.count("cannot be written") == 1


def test_what_could_not_be_written_is_written_later(
    tmp_path: Path, initial: SlotStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gone" / "chat-a.json"
    tries: list[str] = []
    write = status.write
    monkeypatch.setattr(status, "write", lambda path, said: tries.append(said.role) or write(path, said))
    board = Board(path, initial)
    with contextlib.closing(board):
        for role in ("starting", "standby", "standby", "standby"):
            board.show(role, None, ())
        assert tries == ["starting", "standby"]  # not all the time
        since = board.status.since
        path.parent.mkdir()
        assert eventually(lambda: board.show("standby", None, ()) and path.exists())
        found, _ = status.read(path)
        assert found is not None
        assert (found.role, found.since) == ("standby", since)


def test_without_descriptors_there_is_one_to_write_with(
    tmp_path: Path, initial: SlotStatus, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat-a.json"
    before = opened()
    with contextlib.closing(Board(path, initial)) as board:
        board.show("starting", None, ())
        with descriptors(0):
            for board.problem in ("one", "another"):
                board.show("parked", None, ())
            with pytest.raises(OSError, match="Too many open files"):
                path.read_text()
        found, _ = status.read(path)
        assert found is not None
        assert found.problem == "another"
    assert capfd.readouterr().err == ""
    assert opened() == before


def test_whose_engine_was_before(tmp_path: Path, initial: SlotStatus) -> None:
    board = Board(tmp_path / "chat-a.json", initial)
    assert board.predecessor(mine=False) == "chat-b"
    assert board.predecessor(mine=True) == "chat-a's last engine"


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("death", "active: took over from chat-b in 0.21 s (lock 0.00, fence 0.02, memory 0.17, accept 0.00)"),
        ("promote", "active: took over from chat-b in 0.21 s (lock 0.00, fence 0.02, memory 0.17, accept 0.00)"),
        ("wake", "active: woken in 0.21 s (lock 0.00, fence 0.02, memory 0.17, accept 0.00)"),
        ("start", "active after 0.21 s (lock 0.00, fence 0.02, memory 0.17, accept 0.00)"),
    ],
)
def test_how_a_promotion_is_told(cause: Cause, text: str) -> None:
    assert sentence(promotion(cause), "chat-b") == text
