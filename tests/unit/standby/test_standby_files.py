"""The roster and the status files: what is written is read, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors
from weightcache.errors import NoRoom, WeightcacheError
from weightcache.standby import fence, files, roster, status
from weightcache.standby.messages import Process
from weightcache.standby.places import EnginePaths
from weightcache.standby.roster import Roster
from weightcache.standby.status import MOST_PROMOTIONS, Promotion, SlotStatus

BAD = ["", "{", "[]", "null", '{"boot": 1}', "[" * 100_000, "NaN", "\xff"]


def test_a_roster_holds_each_process_once(tmp_path: Path) -> None:
    path = tmp_path / "e.roster"
    assert roster.read(path) == Roster((), 0.0)
    first, second = Process(10, 1), Process(10, 2)
    roster.write(path, Roster((first, second, first), 12.5))
    assert roster.read(path) == Roster((first, second), 12.5)
    assert path.stat().st_mode & 0o777 == 0o640
    roster.write(path, Roster((), 13.0))
    assert roster.read(path) == Roster((), 13.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["e.roster"]


def test_a_roster_of_an_earlier_boot_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, boot = tmp_path / "e.roster", tmp_path / "boot"
    roster.write(path, Roster((Process(10, 1),), 5.0))
    boot.write_text("another\n")
    monkeypatch.setattr(roster, "_BOOT_ID", boot)
    assert roster.read(path) == Roster()


def test_a_roster_of_another_pid_namespace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "e.roster", tmp_path / "ns"
    roster.write(path, Roster((Process(10, 1),), 5.0))
    other.symlink_to("pid:[1]")
    monkeypatch.setattr(roster, "_NAMESPACE", other)
    with pytest.raises(WeightcacheError, match="another PID namespace"):
        roster.read(path)


@pytest.mark.parametrize("text", BAD)
def test_a_damaged_roster_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.roster"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightcacheError, match="damaged"):
        roster.read(path)


def test_a_roster_that_is_a_link_or_endless_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "e.roster"
    roster.write(tmp_path / "real", Roster((Process(10, 1),), 5.0))
    path.symlink_to(tmp_path / "real")
    with pytest.raises(WeightcacheError, match="cannot be opened"):
        roster.read(path)
    path.unlink()
    path.write_bytes(b" " * (files.LONGEST + 1))
    with pytest.raises(WeightcacheError, match="more than"):
        roster.read(path)


@pytest.mark.parametrize("lacks", ["_BOOT_ID", "_NAMESPACE"])
def test_what_the_kernel_does_not_say_about_a_roster_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    path = tmp_path / "e.roster"
    roster.write(path, Roster((Process(10, 1),), 5.0))
    monkeypatch.setattr(roster, lacks, tmp_path / "none")
    for use in (lambda: roster.read(path), lambda: roster.write(path, Roster())):
        with pytest.raises(WeightcacheError, match="none cannot be read"):
            use()


def test_without_descriptors_a_roster_is_an_error_of_ours(tmp_path: Path) -> None:
    """Nothing else ends an engine alone instead of its launcher."""
    path = tmp_path / "e.roster"
    roster.write(path, Roster((Process(10, 1),), 5.0))
    with descriptors(0):
        for use in (lambda: roster.read(path), lambda: roster.write(path, Roster())):
            with pytest.raises(NoRoom, match="Too many open files"):
                use()
    assert roster.read(path) == Roster((Process(10, 1),), 5.0)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "e.roster"
    path.mkdir()
    with pytest.raises(WeightcacheError, match=r"e\.roster cannot be written"):
        roster.write(path, Roster())
    assert [entry.name for entry in tmp_path.iterdir()] == ["e.roster"]
    with pytest.raises(WeightcacheError, match="cannot be written"):
        roster.write(tmp_path / "none" / "e.roster", Roster())


def _status(**fields: object) -> SlotStatus:
    promotion = Promotion(12.5, 0.25, "death", {"lock": 0.001})
    one = SlotStatus("e", "a", "active", 12.0, fence.identify(os.getpid()), promotions=(promotion,))
    return dataclasses.replace(one, **fields)  # type: ignore[arg-type]


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "e-a.json"
    assert status.read(path) == (None, "")
    written = _status(main=Process(10, 1), ranks=(Process(11, 1),), memory=5, model="/m", problem="none")
    status.write(path, written)
    assert status.read(path) == (written, "")
    assert json.loads(path.read_text())["schema"] == 1


def test_a_status_keeps_the_newest_promotions(tmp_path: Path) -> None:
    path = tmp_path / "e-a.json"
    many = tuple(Promotion(float(i), 0.1, "promote") for i in range(MOST_PROMOTIONS + 5))
    status.write(path, _status(promotions=many))
    found, _ = status.read(path)
    assert found is not None
    assert found.promotions == many[5:]


def test_a_status_without_its_launcher_is_down(tmp_path: Path) -> None:
    path = tmp_path / "e-a.json"
    gone = Process(os.getpid(), fence.identify(os.getpid()).started - 1)
    status.write(path, _status(launcher=gone, main=Process(10, 1), ranks=(Process(11, 1),), memory=5))
    found, why = status.read(path)
    assert found == _status(role="down", launcher=gone)
    assert why == ""


@pytest.mark.parametrize("text", BAD)
def test_a_damaged_status_says_why(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e-a.json"
    path.write_bytes(text.encode("latin-1"))
    found, why = status.read(path)
    assert found is None
    assert str(path) in why


def test_a_status_of_a_later_version_or_with_another_role_says_why(tmp_path: Path) -> None:
    path = tmp_path / "e-a.json"
    status.write(path, _status())
    good = json.loads(path.read_text())
    for change in ({"schema": 2}, {"role": "king"}, {"more": 1}, {"restarts": True}):
        path.write_text(json.dumps({**good, **change}))
        found, why = status.read(path)
        assert found is None
        assert "nothing that this version understands" in why
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert status.read(path)[0] is None


def test_each_slot_has_a_roster_of_its_own(tmp_path: Path) -> None:
    places = EnginePaths(tmp_path, "e")
    assert {places.roster(slot).name for slot in "ab"} == {"e-a.roster", "e-b.roster"}


def test_an_engines_directory_is_this_users_own(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        places = EnginePaths(tmp_path / "run" / "engines", "e")
        places.prepare()
        places.prepare()
    finally:
        os.umask(mask)
    assert places.directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(WeightcacheError, match="cannot be made"):
        EnginePaths(tmp_path / "file" / "engines", "e").prepare()
