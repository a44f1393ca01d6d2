"""Directories of stamps: made whole, held while they are used, collected when they are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightcache.compiled import entry as entries, places, store
from weightcache.compiled.entry import Entry
from weightcache.compiled.stamp import Stamp
from weightcache.compiled.store import Store
from weightcache.compiled.written import Written
from weightcache.config import CompiledConfig
from weightcache.errors import PermissionRefused, WeightcacheError
from weightcache.launch.caches import Kept

DAY = 86400.0
HOLDER = """
import sys, time
from pathlib import Path
from weightcache.compiled.stamp import Stamp
from weightcache.compiled.store import open_store
held = open_store(Path(sys.argv[1])).hold(Stamp({"torch": sys.argv[2]}), {})
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Store:
    return store.open_store(tmp_path / "cache")


def made(cache: Store, torch: str, age_days: float = 0.0, size: int = 0) -> Entry:
    with cache.hold(Stamp({"torch": torch}), {}) as held:
        directory = held.entry.directory
    (directory / "triton").mkdir()
    (directory / "triton" / "kernel").write_bytes(b"x" * size)
    moment = time.time() - age_days * DAY
    os.utime(directory / "lock", (moment, moment))
    return entries.read(directory)


def names(entries: tuple[Entry, ...]) -> list[str]:
    return [entry.facts["torch"] for entry in entries]


def test_a_directory_says_what_it_stands_for_and_when_it_was_used(cache: Store) -> None:
    stamp = Stamp({"torch": "2", "python": "3"})
    with cache.hold(stamp, {}) as held:
        assert held.entry.stamp == stamp.digest
        assert json.loads((held.entry.directory / "stamp.json").read_text())["facts"] == stamp.facts
        assert held.entry.directory.stat().st_mode & 0o777 == 0o700
        assert abs(held.entry.used - time.time()) < 60
        assert entries.in_use(held.entry)
        assert not os.get_inheritable(held.fd)
    assert not entries.in_use(held.entry)
    os.utime(held.entry.directory / "lock", (1, 1))
    with cache.hold(stamp, {}) as again:
        assert again.entry.directory == held.entry.directory
        assert again.entry.used > 1
    assert list(cache.root.glob(".*")) == []


def test_many_starts_at_once_share_one_directory(cache: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(lambda _: cache.hold(Stamp({"torch": "2"}), {}), range(40)))
    assert len({one.entry.directory for one in held}) == 1
    assert len({os.fstat(one.fd).st_ino for one in held}) == 1
    for one in held[1:]:
        os.close(one.fd)
    assert not cache.remove(held[0].entry)
    os.close(held[0].fd)
    assert cache.remove(held[0].entry)
    assert list(cache.root.iterdir()) == []


def test_starts_and_removals_at_once(cache: Store) -> None:
    """Whoever holds a directory has one that is there."""

    def start(_: int) -> bool:
        with cache.hold(Stamp({"torch": "2"}), {}) as held:
            time.sleep(0.001)
            return (held.entry.directory / "stamp.json").is_file()

    def removal(_: int) -> None:
        for entry in cache.entries():
            cache.remove(entry)

    with ThreadPoolExecutor(8) as pool:
        starts = [pool.submit(start, i) for i in range(100)]
        removals = [pool.submit(removal, i) for i in range(100)]
        assert all(one.result() for one in starts)
        assert [one.result() for one in removals] == [None] * 100


def test_a_killed_holder_lets_go(cache: Store) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache.root.parent), "old"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (entry,) = cache.entries()
        os.utime(entry.directory / "lock", (1, 1))
        made(cache, "new")
        assert cache.collect(CompiledConfig(max_bytes=0, keep_days=0)) == ()
        assert not cache.remove(entry)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        assert names(cache.collect(CompiledConfig())) == ["old"]
        assert names(cache.entries()) == ["new"]
    finally:
        holder.kill()
        holder.communicate()


def test_what_was_not_used_for_long_goes_but_never_the_newest(cache: Store) -> None:
    for torch, age in (("new", 40), ("old", 50), ("older", 60)):
        made(cache, torch, age)
    assert names(cache.collect(CompiledConfig(keep_days=55))) == ["older"]
    assert sorted(names(cache.collect(CompiledConfig(keep_days=30)))) == ["old"]
    assert names(cache.entries()) == ["new"]
    assert cache.collect(CompiledConfig(max_bytes=0, keep_days=0)) == ()


def test_the_oldest_go_until_all_fit(cache: Store) -> None:
    for torch, age in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        made(cache, torch, age, size=1 << 20)
    assert names(cache.collect(CompiledConfig(max_bytes=2 << 20))) == ["d", "c"]
    assert cache.collect(CompiledConfig(max_bytes=2 << 20)) == ()
    assert names(cache.collect(CompiledConfig(max_bytes=0), own=Stamp({"torch": "b"}).digest)) == []
    assert names(cache.collect(CompiledConfig(max_bytes=0))) == ["b"]


def test_sizes_are_not_taken_at_every_start(cache: Store) -> None:
    for torch, age in (("a", 1), ("b", 2), ("c", 50)):
        made(cache, torch, age, size=1 << 20)
    cache.collect(CompiledConfig(max_bytes=1 << 30, keep_days=100), pause=3600)
    assert names(cache.collect(CompiledConfig(max_bytes=0), pause=3600)) == ["c"]  # age needs no size
    os.utime(cache.root / ".measured", (1, 1))
    assert names(cache.collect(CompiledConfig(max_bytes=0), pause=3600)) == ["b"]
    os.utime(cache.root / ".measured", (time.time() + DAY, time.time() + DAY))  # a clock that was wrong
    made(cache, "d", 3)
    assert names(cache.collect(CompiledConfig(max_bytes=0), pause=3600)) == ["d"]


def test_one_that_is_in_use_is_passed_over_for_an_older_one(cache: Store) -> None:
    made(cache, "new", 0, 1 << 20)
    made(cache, "old", 2, 1 << 20)
    made(cache, "used", 3, 1 << 20)
    held = cache.hold(Stamp({"torch": "used"}), {})
    os.utime(held.entry.directory / "lock", (1, 1))
    with held:
        assert names(cache.collect(CompiledConfig(max_bytes=2 << 20, keep_days=1000000))) == ["old"]


def test_a_use_ends_when_its_holder_lets_go(cache: Store) -> None:
    with cache.hold(Stamp({"torch": "long"}), {}) as held:
        os.utime(held.entry.directory / "lock", (time.time() - 40 * DAY,) * 2)
        made(cache, "new", age_days=1)
    assert cache.collect(CompiledConfig(keep_days=30)) == ()
    assert names(cache.entries()) == ["long", "new"]


def test_letting_go_needs_no_disk_that_can_be_written(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with cache.hold(Stamp({"torch": "2"}), {}) as held:
        monkeypatch.setattr(os, "utime", refuse)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held.fd)


def test_garbage_is_left_alone_or_tidied_up(cache: Store) -> None:
    keep = made(cache, "new")
    (cache.root / "notes.txt").write_text("mine")
    (cache.root / "0123456789abcdef").write_text("a file with a stamp's name")
    (cache.root / "link-0123456789ab").symlink_to("/")
    broken = cache.root / ("f" * 16)
    broken.mkdir()
    (broken / "stamp.json").write_text("{broken")
    (broken / "lock").mkdir()
    left = cache.root / ".gone-0123456789abcdef-x"
    fresh, abandoned = cache.root / ".new-a", cache.root / ".new-b"
    for folder in (left, fresh, abandoned):
        (folder / "triton").mkdir(parents=True)
    os.utime(abandoned, (1, 1))
    assert {entry.stamp for entry in cache.entries()} == {keep.stamp, broken.name}
    assert entries.read(broken).facts == {}
    assert not entries.in_use(entries.read(broken))
    assert cache.collect(CompiledConfig(max_bytes=0, keep_days=0), own=keep.stamp) == ()
    assert not left.exists()
    assert not abandoned.exists()
    assert fresh.exists()
    assert (cache.root / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_used_is_said(tmp_path: Path, cache: Store) -> None:
    stamp = Stamp({"torch": "2"})
    (cache.root / stamp.digest).write_text("")
    with pytest.raises(WeightcacheError, match="cannot be used"):
        cache.hold(stamp, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionRefused, match="cannot be made"):
        store.open_store(tmp_path / "file")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionRefused, match="executed"):
        store.open_store(shared)


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTCACHE_CACHE_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(PermissionRefused, match="WEIGHTCACHE_CACHE_DIR"):
        store.of_user()


def test_a_directory_without_its_files_is_used_all_the_same(cache: Store) -> None:
    entry = made(cache, "2")
    for name in ("lock", "stamp.json"):
        (entry.directory / name).unlink()
    with cache.hold(Stamp({"torch": "2"}), {}) as held:
        assert entries.in_use(held.entry)
        assert (held.entry.directory / "triton" / "kernel").exists()


def test_a_lock_that_was_replaced_is_taken_again(cache: Store) -> None:
    """A directory that went and came back between opening its lock and having it."""
    entry = made(cache, "2")
    opened = os.open(entry.directory / "lock", os.O_RDWR)
    try:
        (entry.directory / "lock").unlink()
        with cache.hold(Stamp({"torch": "2"}), {}) as held:
            assert os.fstat(held.fd).st_ino != os.fstat(opened).st_ino
            assert not cache.remove(held.entry)
    finally:
        os.close(opened)


def test_a_first_stamp_leaves_full_caches_where_they_are(tmp_path: Path, cache: Store) -> None:
    environment = {"HOME": str(tmp_path)}
    (tmp_path / ".triton/cache/kernel").mkdir(parents=True)
    with cache.hold(Stamp({"torch": "2"}), environment) as held:
        assert held.entry.stay == ("TRITON_CACHE_DIR",)
    with cache.hold(Stamp({"torch": "2"}), environment) as held:
        assert held.entry.stay == ("TRITON_CACHE_DIR",)
    with cache.hold(Stamp({"torch": "3"}), environment) as held:
        assert held.entry.stay == ()


def test_only_what_compilers_wrote_is_counted(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (places.SGLANG_CACHE_DIR, *(place.variable for place in places.PLACES)):
        monkeypatch.delenv(variable, raising=False)
    entry = made(cache, "2", size=5000)
    (entry.directory / "triton" / "link").symlink_to("kernel")
    entries.remember(entry, "x")
    marker = Path(Kept(directory=entry.directory).warmed(["--model-path", "m"]))
    for path in (marker, entry.directory / "triton" / "warmed" / "kernel"):
        path.parent.mkdir()
        path.write_text("x")
    assert set(entries.walk(entry.directory)) == {
        entry.directory / "triton" / "kernel", entry.directory / "triton" / "warmed" / "kernel",
    }  # fmt: skip
    assert entries.measure(entry.directory).files == 2
    assert 5000 <= entries.measure(entry.directory).bytes <= 16384


def test_what_happened_is_remembered_and_garbage_is_nothing(cache: Store) -> None:
    entry = made(cache, "2")
    assert entries.rehearsed(entry) == {}
    for i in range(150):
        entries.remember(entry, str(i))
    kept = entries.rehearsed(entry)
    assert len(kept) == 100
    assert "149" in kept
    for text in ("", "[1]", '{"a": "b"}', "{", "[" * 5000):
        (entry.directory / "rehearsed.json").write_text(text)
        assert entries.rehearsed(entry) == {}
    assert not list(entry.directory.glob(".rehearsed*"))


def test_what_was_written_since(tmp_path: Path, cache: Store) -> None:
    (tmp_path / ".triton/cache/kernel").mkdir(parents=True)
    environment = {"HOME": str(tmp_path), "QUACK_CACHE_DIR": str(tmp_path / "mine")}
    with cache.hold(Stamp({"torch": "2"}), environment) as held:
        (held.entry.directory / "old").write_text("x")
        written = Written(held.entry, environment)
        assert written.since().files == 0
        for folder in (held.entry.directory, tmp_path / ".triton/cache/kernel", tmp_path / "mine"):
            folder.mkdir(exist_ok=True)
            (folder / "new").write_text("four")
        entries.remember(held.entry, "x")
        assert (written.since().files, written.since().bytes) == (3, 12)
