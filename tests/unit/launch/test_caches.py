"""The lever ``caches``: on by itself, off when asked for or when its directory cannot be used, with a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.unit.launch.support import ATTACHED, eventually
from weightcache.compiled import store
from weightcache.compiled.entry import in_use
from weightcache.launch.caches import Kept

GOOD = [["ready", "main"], ["ready", "scheduler"], ["decision", ATTACHED]]


def compiled(launcher) -> store.Store:
    return store.Store(Path(launcher.environment["WEIGHTCACHE_CACHE_DIR"]) / "compiled")


def test_the_directory_is_in_use_while_the_engine_runs_and_no_longer(launcher, agent):
    agent()
    launcher.script(*GOOD, ["mark", "serving"], ["sleep", 60])
    process = launcher.start("--model-path", "/models/a")
    launcher.wait_for("serving")
    (entry,) = compiled(launcher).entries()
    assert in_use(entry)
    (run,) = launcher.runs
    assert run["env"]["QUACK_CACHE_DIR"] == str(entry.directory / "quack")
    # The engine has no descriptor of the lock: one that lingers must not hold it.
    lock = (entry.directory / "lock").resolve()
    holders = {
        int(fd.parts[2]) for fd in Path("/proc").glob("[0-9]*/fd/*") if fd.is_symlink() and _target(fd) == str(lock)
    }
    assert holders == {process.pid}
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert eventually(lambda: not in_use(entry), 10)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def test_without_the_lever_nothing_is_added(launcher, agent):
    agent()
    launcher.script(*GOOD)
    status, _, err = launcher.run("--wcache-without", "caches", "--model-path", "/models/a")
    assert (status, err.count("\n")) == (0, 1)
    (run,) = launcher.runs
    added = run["env"].keys() - launcher.environment.keys()
    assert not [name for name in added if name.endswith(("_CACHE_DIR", "CUDA_CACHE_PATH"))]
    assert not Path(launcher.environment["WEIGHTCACHE_CACHE_DIR"]).exists()


def test_a_directory_of_others_is_not_used_and_the_server_starts(launcher, agent):
    agent()
    shared = Path(launcher.environment["WEIGHTCACHE_CACHE_DIR"])
    shared.mkdir()
    shared.chmod(0o777)
    launcher.script(*GOOD)
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0
    said = [line for line in err.splitlines() if "compiled kernels" in line]
    assert said == [
        f"weightcache: compiled kernels are kept where SGLang keeps them: {shared} is not this user's alone to write, "
        "and what lies there is executed"
    ]
    (run,) = launcher.runs
    assert "QUACK_CACHE_DIR" not in run["env"]


def test_a_directory_on_a_full_or_read_only_disk_neither(launcher, agent):
    agent()
    Path(launcher.environment["WEIGHTCACHE_CACHE_DIR"]).write_text("")
    launcher.script(*GOOD)
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0
    assert "cannot be made" in err


def test_old_ones_go_when_an_engine_starts(launcher, agent):
    agent()
    found = store.open_store(Path(launcher.environment["WEIGHTCACHE_CACHE_DIR"]))
    old = found.root / "0123456789abcdef"
    old.mkdir()
    subprocess.run(["touch", "-d", "@1", str(old / "lock")], check=True)
    launcher.script(*GOOD)
    status, _, err = launcher.run("--model-path", "/models/a")
    assert status == 0
    assert f"compiled kernels of {old} were removed" in err
    assert not old.exists()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A directory of a user without compiled kernels elsewhere."""
    for name in list(os.environ):
        if name.endswith(("_CACHE_DIR", "_CACHE_PATH", "_WORKSPACE_BASE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Kept({}, tmp_path / "stamp")


def test_a_start_is_told_apart_by_all_that_it_depends_on(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = ["--model-path", str(tmp_path / "model"), "--tp-size", "2"]
    seen = {kept.warmed(start)}
    assert Path(next(iter(seen))).parent == tmp_path / "stamp" / "warmed"
    assert kept.warmed([*start, "--port", "1", "--api-key", "x"]) in seen
    seen.add(kept.warmed([*start, "--dtype", "float16"]))
    (tmp_path / "model" / "config.json").write_text("{ }")
    seen.add(kept.warmed(start))
    monkeypatch.setenv("SGLANG_SOMETHING", "1")
    seen.add(kept.warmed(start))
    monkeypatch.setenv("PWD", "/elsewhere")
    seen.add(kept.warmed(start))
    assert len(seen) == 5


def test_kernels_that_may_be_gone_vouch_for_nothing(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert Kept().warmed(["--model-path", "m"]) == ""
    assert kept.warmed(["--model-path", "m"])
    for place, vouches in (("nowhere", False), ("empty", False), ("full", True), ("temporary/full", False)):
        folder = tmp_path / place
        if place != "nowhere":
            folder.mkdir(exist_ok=True)
        if place.endswith("full"):
            (folder / "kernel").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        assert bool(kept.warmed(["--model-path", "m"])) is vouches, place


def test_kernels_where_they_always_were_vouch_if_they_are_there(kept: Kept, tmp_path: Path):
    usual = tmp_path / "home" / ".triton" / "cache"
    usual.mkdir(parents=True)
    stay = Kept({}, kept.directory, ("TRITON_CACHE_DIR",))
    assert stay.warmed(["--model-path", "m"]) == ""
    (usual / "kernel").touch()
    assert stay.warmed(["--model-path", "m"])
