"""What a slot says of itself, and how promotions are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightcache.launch.board import Board
from weightcache.launch.promotion import sentence
from weightcache.standby import fence, status
from weightcache.standby.messages import Process
from weightcache.standby.status import Cause, Promotion, SlotStatus

RANKS = (Process(1, 2), Process(3, 4))


@pytest.fixture
def initial() -> SlotStatus:
    return SlotStatus("chat", "a", "starting", 0.0, fence.identify(os.getpid()), listen="127.0.0.1:1")


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


def test_a_full_disk_is_said_once(tmp_path: Path, initial: SlotStatus, capfd: pytest.CaptureFixture[str]) -> None:
    board = Board(tmp_path / "gone" / "chat-a.json", initial)
    board.show("starting", None, ())
    board.show("standby", None, ())
    assert capfd.readouterr().err.count("cannot be written") == 1


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
