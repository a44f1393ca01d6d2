"""The packages as files: the same bytes each time, the same content in both, and nothing that a linter objects to."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.package.builds import VERSION, Builds
from tests.support.environments import REPOSITORY, environments

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
OWN_PLACES = re.compile(r"^/usr/share/(doc|licenses)/")
"""Where each family keeps notices and documentation in its own way."""


def digest(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def deb_files(builds: Builds) -> dict[str, str]:
    """Mode (and target) by path of everything but folders."""
    found = {}
    for line in builds.workshop.sh(f"dpkg-deb -c {builds.inside(builds.deb())}").splitlines():
        mode, _, _, _, _, name = line.split(None, 5)
        if mode[0] != "d":
            path, _, target = name.removeprefix(".").partition(" -> ")
            # Debian's zsh looks elsewhere.
            found[path.replace("/vendor-completions/", "/site-functions/")] = f"{mode} {target}"
    return found


def rpm_files(builds: Builds) -> dict[str, str]:
    """The same of the rpm."""
    query = r"[%{FILEMODES:perms} %{FILENAMES} %{FILELINKTOS}\n]"
    found = {}
    for line in builds.workshop.sh(f"rpm -qp --qf '{query}' {builds.inside(builds.rpm())}").splitlines():
        mode, path, *target = line.split(" ")
        if mode[0] != "d":
            found[path] = f"{mode} {target[0] if target else ''}"
    return found


def test_both_packages_have_the_same_content(builds: Builds) -> None:
    deb, rpm = deb_files(builds), rpm_files(builds)
    of_both = {path: mode for path, mode in deb.items() if not OWN_PLACES.match(path)}
    assert of_both == {path: mode for path, mode in rpm.items() if not OWN_PLACES.match(path)}
    assert len(of_both) > 500
    for of_one in (deb, rpm):
        documents = {Path(path).name.removesuffix(".gz") for path in of_one if OWN_PLACES.match(path)}
        assert {"README.md", "operations.md", "standby.md", "packages.md"} < documents
    assert any(path.endswith("/weightcache/copyright") for path in deb)
    assert any(path.endswith("/LICENSE") for path in rpm if OWN_PLACES.match(path))


@pytest.mark.parametrize("kind", ["source", "deb", "rpm"])
def test_the_same_sources_give_the_same_bytes(builds: Builds, kind: str) -> None:
    one, other = (getattr(builds, kind)(which) for which in ("now", "again"))
    assert digest(one) == digest(other)


def test_nothing_names_the_machine_that_built_it(builds: Builds) -> None:
    own = [str(REPOSITORY), str(environments().root), str(builds.folder), "/tmp/tmp.", tempfile.gettempdir() + "/"]
    tree = builds.workshop.sh(
        f"dpkg-deb -R {builds.inside(builds.deb())} /tmp/x;"
        + f"grep -rlF {' '.join(f'-e {word}' for word in own)} /tmp/x || true"
    )
    assert tree == ""


def test_lintian_has_nothing_to_say(builds: Builds) -> None:
    tags = (HERE / "lintian.tags").read_text()
    (builds.folder / "lintian.tags").write_text(tags)
    said = builds.workshop.run(
        *("lintian", "--allow-root", "--fail-on", "error,warning", "--suppress-tags-from-file", "/build/lintian.tags"),
        builds.inside(builds.deb()),
        check=False,
    )
    assert (said.returncode, said.stdout) == (0, "")


def test_rpmlint_has_nothing_to_say(builds: Builds) -> None:
    (builds.folder / "rpmlint.toml").write_text((HERE / "rpmlint.toml").read_text())
    # The source package, too: only there rpmlint reads the spec.
    source = f"rpmbuild -ts --nodeps --define '_topdir /tmp' now/{builds.source().name} >&2;"
    said = builds.workshop.run(
        *("bash", "-ec", f"cd /build; {source} rpmlint -c rpmlint.toml /tmp/SRPMS/*.rpm now/*.rpm"), check=False
    )
    assert said.returncode == 0
    assert "0 errors, 0 warnings" in said.stdout, said.stdout


def test_one_version_everywhere(builds: Builds) -> None:
    assert builds.deb().name == f"weightcache_{VERSION}-1_all.deb"
    assert builds.rpm().name == f"weightcache-{VERSION}-1.noarch.rpm"
    assert [name for name in deb_files(builds) if name.endswith(".whl")] == [
        f"/usr/share/weightcache/weightcache-{VERSION}-py3-none-any.whl"
    ]


def test_make_runs_these_builds() -> None:
    dry = ["make", "--no-print-directory", "-n", "packages"]
    shown = subprocess.run(dry, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    source = f"build/packages/weightcache-{VERSION}.tar.gz build/packages"
    assert shown.splitlines() == [
        "packaging/source.sh build/packages",
        f"packaging/deb/build.sh {source}",
        f"packaging/rpm/build.sh {source}",
    ]


def test_what_is_vendored_is_pure_python_and_declared(builds: Builds) -> None:
    vendored = {name for name in rpm_files(builds) if name.startswith("/usr/lib/weightcache/vendor/")}
    assert vendored
    assert not [name for name in vendored if re.search(r"\.(so|pyd|a|o)(\.|$)", name)]
    pins = dict(
        line.split("==") for line in (REPOSITORY / "tests/env/agent.txt").read_text().splitlines() if line[0] != "#"
    )
    provided = builds.workshop.sh(f"rpm -qp --provides {builds.inside(builds.rpm())}")
    declared = dict(re.findall(r"bundled\(python3dist\((.+)\)\) = (.+)", provided))
    assert declared == {name.lower().replace("_", "-"): version for name, version in pins.items()}


def test_what_they_depend_on(builds: Builds) -> None:
    needs = builds.workshop.sh(f"dpkg-deb -f {builds.inside(builds.deb())} Depends Architecture")
    assert needs == "Depends: python3 (>= 3.11), python3-psutil, systemd (>= 252)\nArchitecture: all\n"
    required = builds.workshop.sh(f"rpm -qp --requires {builds.inside(builds.rpm())}").splitlines()
    own = {line for line in required if not line.startswith(("rpmlib(", "config("))}
    assert own == {"/bin/sh", "/usr/bin/python3", "python3 >= 3.11", "python3-psutil", "systemd >= 252"}


@pytest.mark.parametrize(("option", "python"), [("", "python3.12"), ("--with python311", "python3.11")])
def test_red_hat_9_gets_a_newer_python_beside_its_own(builds: Builds, option: str, python: str) -> None:
    asked = f"rpmspec --define 'rhel 9' {option} /tmp/weightcache.spec"
    shown = builds.workshop.sh(
        f"tar -C /tmp --strip-components=3 -xf now/{builds.source().name} --wildcards '*/rpm/weightcache.spec';"
        f"{asked} -q --qf '[needs %{{REQUIRENAME}}\\n][likes %{{RECOMMENDNAME}}\\n]';"
        f"{asked} -P | grep -o 'INTERPRETER=[^ ]*'"
    ).splitlines()
    assert [line for line in shown if "python" in line] == [
        f"needs {python}",
        f"likes {python}-psutil",
        f"INTERPRETER=/usr/bin/{python}",
    ]


def test_the_wheel_is_what_setuptools_would_build(builds: Builds, tmp_path: Path) -> None:
    subprocess.run(["tar", "-C", tmp_path, "-xf", builds.source(), "--strip-components=1"], check=True)
    subprocess.run(
        [environments().engine(), "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "."],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    [built] = tmp_path.glob("*.whl")
    builds.workshop.sh(
        f"dpkg-deb --fsys-tarfile {builds.inside(builds.deb())} |"
        f"tar -xO ./usr/share/weightcache/{built.name} >{built.name}"
    )
    with zipfile.ZipFile(built) as theirs, zipfile.ZipFile(builds.folder / built.name) as ours:
        assert ours.testzip() is None
        files = set(ours.namelist())
        assert files == {name for name in theirs.namelist() if not name.endswith("/top_level.txt")}
        info = f"weightcache-{VERSION}.dist-info"
        for name in files - {f"{info}/{part}" for part in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}:
            assert ours.read(name) == theirs.read(name)
        fields = r"(?m)^(Name|Version|Summary|License|Requires-Python|Provides-Extra): (.*)$"
        texts = [wheel.read(f"{info}/METADATA").decode() for wheel in (ours, theirs)]
        described, needed = (
            [sorted(re.findall(pattern, text)) for text in texts] for pattern in (fields, "(?m)^Requires-Dist: (.*)$")
        )
        assert described[0] == described[1]
        assert set(map(Requirement, needed[0])) == set(map(Requirement, needed[1])) != set()
        points = [sorted(w.read(f"{info}/entry_points.txt").decode().split("\n")) for w in (ours, theirs)]
        assert [line for line in points[0] if line] == [line for line in points[1] if line]
