"""Promises about the project itself: what it installs, and how it is cut into modules."""

import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import weightcache
from tests.support.environments import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SOURCES = sorted((REPOSITORY / "agent").rglob("*.py"))
HELP = {"wcache": "--help", "wcache-launch": "--wcache-help", "wcache-top": "--help"}
"""How each console script is asked: the launcher leaves --help to SGLang."""
MEDIAN_LINES = 150
MOST_LINES = 500


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("script", PROJECT["project"]["scripts"])
def test_every_command_explains_itself(script: str) -> None:
    command = Path(sys.executable).with_name(script)
    shown = subprocess.run([command, HELP[script]], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert script in shown.stdout


def test_packages_are_the_folders_that_hold_modules() -> None:
    folders = {path.parent.relative_to(REPOSITORY / "agent") for path in SOURCES}
    expected = {".".join(["weightcache", *folder.parts]) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


def test_modules_are_small() -> None:
    sizes = {path.relative_to(REPOSITORY).as_posix(): lines(path) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}
    assert statistics.median(size for size in sizes.values() if size) < MEDIAN_LINES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install` would make of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    shutil.copytree(REPOSITORY / "agent", folder / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", folder]
    built = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    [found] = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    modules = {path for path in names if path.parts[0] == "weightcache" and path.suffix == ".py"}
    assert modules == {"weightcache" / path.relative_to(REPOSITORY / "agent") for path in SOURCES}
    assert {Path("weightcache/py.typed"), Path("weightcache/engine/evidence.toml")} <= names
    assert {path.parts[0].split("-")[0] for path in names} == {"weightcache"}


def test_the_wheel_says_which_version_and_plugin_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"weightcache-{weightcache.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert f"\nVersion: {weightcache.__version__}\n" in metadata
    assert "[sglang.srt.plugins]\nweightcache = weightcache.engine.plugin:setup\n" in entry_points


def test_the_changelog_knows_this_version() -> None:
    assert f"\n## [{weightcache.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()
