"""The packages of this checkout, built as `make packages` does, twice; and those of a next version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import weightcache
from tests.package.workshop import WORK, Workshop
from tests.support.environments import REPOSITORY, environments

VERSION = weightcache.__version__
NEXT = f"{VERSION}.99"
"""What an upgrade upgrades to."""


@dataclass(frozen=True, slots=True)
class Builds:
    """A folder with sub-folders: ``now``, ``again`` (the same, built once more), ``next``."""

    workshop: Workshop

    @property
    def folder(self) -> Path:
        """Where the packages are."""
        return self.workshop.folder

    def deb(self, which: str = "now") -> Path:
        """The Debian package."""
        return self._one(which, "weightcache_*_all.deb")

    def rpm(self, which: str = "now") -> Path:
        """The rpm."""
        return self._one(which, "weightcache-*.noarch.rpm")

    def source(self, which: str = "now") -> Path:
        """The archive that both were built from."""
        return self._one(which, "weightcache-*.tar.gz")

    def inside(self, path: Path) -> str:
        """The path in the workshop."""
        return f"{WORK}/{path.relative_to(self.folder)}"

    def _one(self, which: str, pattern: str) -> Path:
        [found] = (self.folder / which).glob(pattern)
        return found


def build(folder: Path) -> Builds:
    """Build everything: Debian packages beside rpms, since a build is mostly one thread's work."""
    folder.chmod(0o755)
    builds = Builds(Workshop(folder))
    for which in ("now", "again", "next"):
        (folder / which).mkdir()
    archive(folder / "now")
    archive(folder / "again")
    renamed(builds.source(), folder / "next")
    problems: list[BaseException] = []
    halves = [threading.Thread(target=_half, args=(builds, kind, problems)) for kind in ("deb", "rpm")]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    if problems:
        raise problems[0]
    return builds


def archive(out: Path) -> None:
    """Pack the checkout, without a network."""
    [vendor] = environments().agent.parent.with_name("lib").glob("python3.*/site-packages")
    variables = {**os.environ, "VENDOR": str(vendor)}
    subprocess.run([REPOSITORY / "packaging" / "source.sh", out], env=variables, check=True, capture_output=True)


def renamed(source: Path, out: Path) -> None:
    """The same archive as another version."""
    subprocess.run(["tar", "-C", out, "-xf", source], check=True)
    [old] = out.iterdir()
    tree = old.rename(out / f"weightcache-{NEXT}")
    for name, pattern, text in (
        ("agent/__init__.py", r'__version__ = ".*"', f'__version__ = "{NEXT}"'),
        ("packaging/deb/changelog", r"^weightcache \(.*?\)", f"weightcache ({NEXT}-1)"),
        ("packaging/rpm/weightcache.spec", r"Version:( +).*", rf"Version:\g<1>{NEXT}"),
    ):
        path = tree / name
        before = path.stat()
        changed, times = re.subn(pattern, text, path.read_text(), count=1)
        assert times == 1, name
        path.write_text(changed)
        os.utime(path, (before.st_atime, before.st_mtime))
    subprocess.run(["tar", "-C", out, "-czf", out / f"{tree.name}.tar.gz", tree.name], check=True)
    shutil.rmtree(tree)


def _half(builds: Builds, kind: str, problems: list[BaseException]) -> None:
    try:
        for which in ("now", "next", "again"):
            # Elsewhere, and for another user's mask.
            around = "umask 077; export TMPDIR=$(mktemp -d); " if which == "again" else ""
            script = f"packaging/{kind}/build.sh"
            name = builds.source(which).name
            builds.workshop.sh(
                f"{around}mkdir /tmp/tools; tar -C /tmp/tools --strip-components=1 -xf {which}/{name};"
                f"/tmp/tools/{script} {which}/{name} {which}"
            )
    except BaseException as error:
        problems.append(error)
