"""Byte 0: waited for by one thread, given up while it waits, and never kept by whom nobody wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent import eventually
from weightcache.engine.election import BYTE, Election
from weightcache.errors import WeightcacheError
from weightcache.standby.locks import ByteLock, is_taken

SECONDS = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def other(path: Path) -> Iterator[ByteLock]:
    """The active engine's lock."""
    lock = ByteLock(path, BYTE)
    lock.take()
    yield lock
    lock.close()


class Candidate:
    """A call of win() in a thread."""

    def __init__(self, election: Election) -> None:
        self.outcome = ""
        self._election = election
        self._thread = threading.Thread(target=self._win)
        self._thread.start()
        eventually(lambda: election._candidate is not None or not self._thread.is_alive(), SECONDS)

    def _win(self) -> None:
        try:
            self._election.win()
            self.outcome = "won"
        except WeightcacheError as error:
            self.outcome = error.message

    def end(self) -> str:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.outcome

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def test_a_lock_that_is_free_is_taken_at_once(path: Path) -> None:
    election = Election(path)
    election.win()
    election.win()
    assert (election.won, is_taken(path, BYTE)) == (True, True)
    election.give_up()
    assert (election.won, is_taken(path, BYTE)) == (False, False)


def test_it_waits_for_the_other_ones_end(path: Path, other: ByteLock) -> None:
    election = Election(path)
    candidate = Candidate(election)
    assert candidate.waits
    assert not election.won
    other.close()
    assert candidate.end() == "won"
    assert is_taken(path, BYTE)


def test_one_call_waits_at_a_time(path: Path, other: ByteLock) -> None:
    election = Election(path)
    candidate = Candidate(election)
    with pytest.raises(WeightcacheError, match="waits to be elected already"):
        election.win()
    other.close()
    assert candidate.end() == "won"


def test_who_gives_up_does_not_keep_what_comes_later(path: Path, other: ByteLock) -> None:
    election = Election(path)
    candidate = Candidate(election)
    election.give_up()
    assert candidate.end() == "the lock was given up before this engine had it"
    other.give_back()
    eventually(lambda: not election._waits, SECONDS)
    assert not election.won
    assert not is_taken(path, BYTE)
    election.win()  # and is a candidate again
    assert is_taken(path, BYTE)


def test_who_wants_it_again_goes_on_with_the_same_wait(path: Path, other: ByteLock) -> None:
    election = Election(path)
    first = Candidate(election)
    election.give_up()
    assert "given up" in first.end()
    second = Candidate(election)
    waiting = [thread for thread in threading.enumerate() if thread.name == "weightcache-election"]
    assert len(waiting) == 1
    other.close()
    assert second.end() == "won"
    assert election.won


def test_a_lock_that_cannot_be_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    election = Election(path)

    def take(_: ByteLock) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(ByteLock, "take", take)
        with pytest.raises(OSError, match="No locks available"):
            election.win()
    election.win()
    assert election.won
