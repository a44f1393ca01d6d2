"""What packages install: everything that is needed, nothing else, and the same every time."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path

import pytest

import weightcache
from tests.support.environments import REPOSITORY, environments
from tests.support.stage import staged

PROGRAMS = {
    "usr/bin/wcache",
    "usr/bin/wcache-launch",
    "usr/bin/wcache-top",
    "usr/libexec/weightcache/agent",
    "usr/libexec/weightcache/loader",
}
LIBRARY = "usr/lib/weightcache"


def listing(tree: Path) -> dict[str, tuple[int, float, str]]:
    """Mode, time and content of everything below ``tree``."""
    found = {}
    for path in [tree, *tree.rglob("*")]:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[path.relative_to(tree).as_posix()] = (stat.S_IMODE(status.st_mode), status.st_mtime, content)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return staged(tmp_path_factory.mktemp("stage"))


def files(tree: Path, below: str = "") -> set[str]:
    return {path.relative_to(tree / below).as_posix() for path in (tree / below).rglob("*") if not path.is_dir()}


def test_every_module_and_no_leftover(tree: Path) -> None:
    agent = REPOSITORY / "agent"
    modules = {path.relative_to(agent).as_posix() for path in agent.rglob("*") if path.suffix in (".py", ".tcss")}
    assert files(tree, f"{LIBRARY}/weightcache") == modules | {"py.typed", "engine/evidence.toml"}


def test_nothing_outside_the_documented_places(tree: Path) -> None:
    places = {
        "/".join(Path(name).parts[:4]) for name in files(tree) if name not in PROGRAMS and not name.startswith("etc")
    }
    assert places == {
        f"{LIBRARY}/weightcache",
        f"{LIBRARY}/vendor",
        "usr/lib/systemd/system",
        "usr/lib/systemd/system-preset",
        "usr/lib/sysusers.d/weightcache.conf",
        "usr/lib/tmpfiles.d/weightcache.conf",
        "usr/share/weightcache/weightcache-rules.yml",
        "usr/share/weightcache/weightcache-dashboard.json",
        f"usr/share/weightcache/weightcache-{weightcache.__version__}-py3-none-any.whl",
        *(f"usr/share/man/man{section}" for section in (1, 5, 8)),
        "usr/share/bash-completion/completions",
        "usr/share/zsh/site-functions",
    }
    configured = {"etc/weightcache/weightcache.toml", "etc/needrestart/conf.d/weightcache.conf"}
    assert {name for name in files(tree) if name.startswith("etc")} == configured


def test_every_unit_is_there(tree: Path) -> None:
    sources = {path.name for path in (REPOSITORY / "agent" / "units").iterdir()}
    units = {name for name in sources if not name.endswith((".conf", ".preset"))}
    assert files(tree, "usr/lib/systemd/system") == units
    assert len(sources - units) == 3


def test_modes_and_licences(tree: Path) -> None:
    modes = {name: mode for name, (mode, _, _) in listing(tree).items()}
    assert {name for name in files(tree) if modes[name] != 0o644 and not (tree / name).is_symlink()} == PROGRAMS
    assert {modes[name] for name in PROGRAMS} == {0o755}
    assert {mode for name, mode in modes.items() if (tree / name).is_dir() and name != "."} == {0o755}


def requirements() -> dict[str, str]:
    """Version by name of what is vendored."""
    lines = (REPOSITORY / "tests" / "env" / "agent.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] != "#")


def test_all_that_a_wheel_brought_is_there_and_nothing_that_its_installation_made(tree: Path) -> None:
    vendor = tree / LIBRARY / "vendor"
    [site] = environments().agent.parent.with_name("lib").glob("python3.*/site-packages")
    expected: set[str] = set()
    for name, version in requirements().items():
        info = site / f"{name.lower().replace('-', '_')}-{version}.dist-info"
        names = {line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()}
        brought = {name for name in names if not name.startswith(("../", f"{info.name}/")) and name[-4:] != ".pyc"}
        assert brought
        expected |= brought - {"example.py"}
    licences = {name for name in files(vendor) if "/" not in name and not name.endswith(".py")}
    assert files(vendor) - licences == expected
    assert {"pynvml.py", "typing_extensions.py", "textual/tree-sitter/highlights/bash.scm"} <= expected
    assert not [name for name in files(vendor) if "__pycache__" in name or "/tests/" in name]


@pytest.mark.parametrize(("name", "version"), requirements().items())
def test_every_vendored_package_comes_with_its_licence(tree: Path, name: str, version: str) -> None:
    vendor = tree / LIBRARY / "vendor"
    if name == "nvidia-ml-py":  # it has no such file
        assert "Redistribution and use in source and binary forms" in (vendor / "pynvml.py").read_text()[:2000]
    else:
        assert list(vendor.glob(f"{name}-{version}.LICEN[CS]E*"))


@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no python3 of a distribution")
@pytest.mark.parametrize(
    "command", ["usr/bin/wcache metrics --help", "usr/bin/wcache exporter --help", "usr/bin/wcache-top --help"]
)
def test_programs_run_on_the_distributions_python_with_what_is_vendored(tree: Path, command: str) -> None:
    program, *arguments = command.split()
    moved = (tree / program).read_text().replace(f'"/{LIBRARY}', f'"{tree}/{LIBRARY}')
    interpreter = ["/usr/bin/python3", "-IB", "-W", "error", "-c", moved.partition("\n")[2]]
    shown = subprocess.run([*interpreter, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: ")


def test_metrics_are_printed_without_anything_else_installed(tree: Path, tmp_path: Path) -> None:
    moved = (tree / "usr/bin/wcache").read_text().replace(f'"/{LIBRARY}', f'"{tree}/{LIBRARY}')
    shown = subprocess.run(
        ["/usr/bin/python3", "-IBS", "-c", moved.partition("\n")[2], "--runtime-dir", tmp_path, "metrics"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "weightcache_build_info" in shown.stdout
    assert not list(tree.rglob("__pycache__"))


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_programs_import_nothing_of_their_caller(tree: Path, program: str) -> None:
    lines = (tree / program).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/python3 -IB"
    assert f'sys.path[:0] = ["/{LIBRARY}", "/{LIBRARY}/vendor"]' in lines


def test_the_same_sources_give_the_same_tree(tmp_path: Path) -> None:
    one, other = (staged(tmp_path / name, SOURCE_DATE_EPOCH="1700000000") for name in ("one", "other"))
    assert listing(one) == listing(other)
    assert {when for _, when, _ in listing(one).values()} == {1700000000.0}


def test_a_used_folder_is_refused(tree: Path) -> None:
    done = subprocess.run([REPOSITORY / "packaging" / "stage.sh", tree], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"stage.sh: {tree} holds a tree already\n")
