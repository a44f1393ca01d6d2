"""Which directory it is; those that others may have made are taken only if nobody else can change what is in them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from weightcache import config, paths
from weightcache.errors import ConfigError, WeightcacheError
from weightcache.launch import sockets
from weightcache.monitor import site
from weightcache.paths import own_directory
from weightcache.server import settings
from weightcache.standby.places import EnginePaths


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o1777)
    return made


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_missing_is_made_for_its_owner_to_write(shared: Path) -> None:
    mask = os.umask(0)
    try:
        assert own_directory(shared / "a" / "b") == shared / "a" / "b"
        assert own_directory(shared / "a" / "c", 0o700) == shared / "a" / "c"
    finally:
        os.umask(mask)
    assert [mode_of(shared / name) for name in ("a", "a/b", "a/c")] == [0o755, 0o755, 0o700]
    own_directory(shared / "a" / "b")


@pytest.mark.parametrize("below", ["", "run"])
def test_a_directory_of_another_user_among_everybodys_is_refused(
    shared: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared / "theirs").mkdir()
    (shared / "theirs").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0 and below:  # what root has made may be on the way
        own_directory(shared / "theirs" / below)
        os.chown(shared / "theirs", 7, 7)
    with pytest.raises(ConfigError, match="must be a directory that belongs to uid"):
        own_directory(shared / "theirs" / below)
    assert ConfigError.exit_status == 78


@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_among_everybodys_is_refused(shared: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "mine").mkdir()
    (shared / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="remove it or choose another one"):
        own_directory(shared / "link" / below)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_one_that_others_may_write_is_refused_among_everybodys(shared: Path, mode: int) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(mode)
    with pytest.raises(ConfigError):
        own_directory(shared / "open")
    if mode & stat.S_ISVTX:  # as $TMPDIR: nobody moves there what is another user's
        assert own_directory(shared / "open" / "run").is_dir()
    else:
        with pytest.raises(ConfigError):
            own_directory(shared / "open" / "run")
        assert not (shared / "open" / "run").exists()


def test_elsewhere_an_administrator_may_have_made_it_for_others(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    theirs.chmod(0o775)
    link.symlink_to(theirs)
    assert own_directory(link) == link
    for path in (theirs, link):
        with pytest.raises(ConfigError):
            own_directory(path, private=True)
    assert mode_of(own_directory(tmp_path / "own", 0o700, private=True)) == 0o700


def test_what_cannot_be_one_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no directory"):
        own_directory(tmp_path / "file")
    with pytest.raises(WeightcacheError, match=r"below cannot be made \(Not a directory\)"):
        own_directory(tmp_path / "file" / "below")


def test_an_engines_directory_is_looked_at_as_well(shared: Path, tmp_path: Path) -> None:
    (shared / "run").symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        EnginePaths(shared / "run" / "engines", "e").prepare()
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("option", [None, Path("/option")])
@pytest.mark.parametrize("configured", ["", "/configured"])
@pytest.mark.parametrize("variable", ["", "/variable"])
def test_agent_commands_and_launcher_look_in_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: Path | None, configured: str, variable: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[agent]\nruntime_dir = "{configured}"\n' * bool(configured) + '[memory]\nbackend = "host"\n')
    monkeypatch.setenv("WEIGHTCACHE_RUNTIME_DIR", variable)
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME_DIR", tmp_path)
    expected = option or Path(configured or variable or tmp_path)
    assert settings.resolve(settings.Options(0, config=file, runtime_dir=option)).paths.directory == expected
    assert site.open_site(file, option).directory == expected
    assert sockets.directory(option, config.load(file)) == expected
    # Engines' files are no agent's.
    assert site.open_site(file, option).engines == (option or Path(variable or tmp_path)) / "engines"
