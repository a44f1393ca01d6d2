"""`wcache caches`: what is kept, and `clean`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from weightcache.compiled import places, store
from weightcache.compiled.stamp import Stamp


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> store.Store:
    monkeypatch.setenv("WEIGHTCACHE_CACHE_DIR", str(tmp_path / "cache"))
    for name in (places.SGLANG_CACHE_DIR, *(place.variable for place in places.PLACES)):
        monkeypatch.delenv(name, raising=False)
    return store.open_store(tmp_path / "cache")


def made(cache: store.Store, age: float, **facts: str) -> Path:
    with cache.hold(Stamp(facts), {}) as held:
        directory = held.entry.directory
    (directory / "triton").mkdir()
    (directory / "triton" / "kernel").write_bytes(b"x" * (1 << 20))
    os.utime(directory / "lock", (time.time() - age, time.time() - age))
    return directory


def test_nothing_yet_and_nothing_is_made(host, cache):
    cache.root.rmdir()
    result = host.wcache("caches")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"nothing yet in {cache.root}")
    assert json.loads(host.wcache("caches", "--json").out)["stamps"] == []
    assert host.wcache("caches", "clean", "--all").out == "removed 0 stamps, 0 GB\n"
    assert not cache.root.exists()


def test_stamps_with_what_they_stand_for(host, cache, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    old = made(cache, 86400 * 3, python="CPython 3.11.2", torch="2.9", sglang="0.5.17", gpu="NVIDIA H200")
    new = made(cache, 60, torch="2.14.1\x1b[31m")
    with cache.hold(Stamp({"torch": "2.14.1\x1b[31m"}), {}):
        lines = host.wcache("caches").out.splitlines()
        plain = json.loads(host.wcache("caches", "--json").out)
    assert lines[0].split()[:4] == ["STAMP", "SIZE", "FILES", "LAST"]
    assert lines[1].startswith(new.name)
    assert " yes " in lines[1]
    assert "\\x1b[31m" in lines[1]
    assert lines[2].split("  ")[0] == old.name
    assert all(text in lines[2] for text in ("3 d 0 h ago", " no ", "CPython 3.11.2", "2.9", "0.5.17", "NVIDIA H200"))
    assert lines[3] == "TRITON_CACHE_DIR is left as the environment says"
    assert [entry["stamp"] for entry in plain["stamps"]] == [new.name, old.name]
    assert plain["schema"] == 1
    assert plain["stamps"][0]["in_use"] is True
    assert plain["stamps"][1]["files"] == 1
    assert plain["stamps"][1]["facts"]["sglang"] == "0.5.17"
    assert plain["operators"] == {"TRITON_CACHE_DIR": "TRITON_CACHE_DIR"}


def test_more_than_the_limit_is_said(host, cache):
    made(cache, 0, torch="2")
    host.config.write_text(host.config.read_text() + '[compiled]\nmax_bytes = "512KiB"\nkeep_days = 2\n')
    assert "more than compiled.max_bytes" in host.wcache("caches").out
    assert json.loads(host.wcache("caches", "--json").out)["limits"] == {"max_bytes": 512 << 10, "keep_days": 2.0}


def test_clean_leaves_the_last_used_one_and_those_in_use(host, cache):
    new, old, used = made(cache, 0, torch="3"), made(cache, 60, torch="2"), made(cache, 120, torch="1")
    with cache.hold(Stamp({"torch": "1"}), {}) as held:
        os.utime(held.entry.directory / "lock", (1, 1))
        result = host.wcache("caches", "clean")
        assert (result.status, result.err) == (0, "")
        assert result.out.startswith("removed 1 stamp, 1.0")
        assert (new.exists(), old.exists(), used.exists()) == (True, False, True)
        every = host.wcache("caches", "clean", "--all", "--json")
        assert every.status == 1
        assert used.name in every.err
        assert json.loads(every.out)["removed"] == [new.name]
        assert json.loads(every.out)["in_use"] == [used.name]
    assert host.wcache("caches", "clean", "--all").status == 0
    assert list(cache.root.iterdir()) == []


def test_a_directory_that_others_can_write_is_refused(host, cache):
    cache.root.chmod(0o777)
    result = host.wcache("caches")
    assert (result.status, result.out) == (77, "")
    assert "executed" in result.err
