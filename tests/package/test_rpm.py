"""The rpm: into an empty root, by dnf from a repository, and with its scripts on a booted host.

There is no Fedora or RHEL here: rpm, dnf and createrepo_c are real and Debian's, and what the package depends on is a
stub in a repository of the test's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.package.builds import Builds
from tests.package.host import DnfHost
from tests.package.sides import Standin
from tests.package.story import EXPORTER, LOADERS, SOCKET, TARGET, Story, told
from tests.systemd.rank import CONFIG

pytestmark = pytest.mark.timeout(900)

STUBS = """\
Name: stubs
Version: 1
Release: 1
Summary: Stubs
License: MIT
BuildArch: noarch
Provides: python3 = 3.11
Provides: {psutil}
Provides: systemd = 252
Provides: /bin/sh
Provides: /usr/bin/python3
%description
Stubs.
%files
"""
SITE_PRESET = "/etc/systemd/system-preset/00-site.preset"


@pytest.fixture(scope="module")
def repository(builds: Builds) -> Path:
    """A repository with the stubs."""
    return made(builds, "repository", "python3-psutil")


def made(builds: Builds, name: str, psutil: str) -> Path:
    """A repository of this name with stubs."""
    (builds.folder / "stubs.spec").write_text(STUBS.format(psutil=psutil))
    builds.workshop.sh(
        f"rm -rf {name}; mkdir {name}; rpmbuild -bb --define '_topdir /tmp/t' stubs.spec >&2;"
        f"cp /tmp/t/RPMS/noarch/*.rpm {name}/; createrepo_c -q {name}"
    )
    return builds.folder / name


def dnf(builds: Builds, repository: Path, check: bool = True) -> str:
    """Install the package below /tmp/r, list what is there, and let rpm verify it."""
    return builds.workshop.sh(
        "dnf -y --installroot=/tmp/r --releasever=9 --disablerepo='*'"
        f" --repofrompath=stubs,file:///build/{repository.name} --nogpgcheck --setopt=cachedir=/tmp/c"
        f" --setopt=tsflags=noscripts install ./now/{builds.rpm().name} 2>&1;"
        "rpm --root /tmp/r -qa; rpm --root /tmp/r -V weightcache && echo verified",
        check=check,
    )


def test_rpm_installs_into_an_empty_root(builds: Builds) -> None:
    shown = builds.workshop.sh(
        "rpm --root /tmp/r --initdb;"
        f"rpm --root /tmp/r -i --nodeps --noscripts now/{builds.rpm().name};"
        "rpm --root /tmp/r -V --nodeps weightcache; cat /tmp/r/etc/weightcache/weightcache.toml;"
        "rpm --root /tmp/r -e --nodeps --noscripts weightcache; find /tmp/r -name '*weightcache*' -o -name 'wcache*'"
    )
    assert shown.startswith("# /etc/weightcache/weightcache.toml: ")
    assert "/tmp/r" not in shown


def test_dnf_resolves_what_it_needs(builds: Builds, repository: Path) -> None:
    shown = dnf(builds, repository)
    assert "stubs-1-1.noarch" in shown.splitlines()
    assert shown.splitlines()[-1] == "verified"


def test_dnf_says_what_is_missing(builds: Builds) -> None:
    shown = dnf(builds, made(builds, "poor", "nothing"), check=False)
    assert "nothing provides python3-psutil needed by weightcache" in shown


@pytest.fixture(scope="module")
def story(builds: Builds, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A host with dnf whose administrator has a preset of his own."""
    side = Standin()
    host = DnfHost(tmp_path_factory.mktemp("empty"), (*side.readable, builds.folder), repository)
    with told(host, side) as story:
        host.write_file(SITE_PRESET, f"disable {LOADERS}\nenable {EXPORTER}\n")
        yield story


def test_install_follows_presets(story: Story, builds: Builds) -> None:
    story.install(builds.rpm())
    assert story.enabled(TARGET, LOADERS, SOCKET, EXPORTER) == ["enabled", "disabled", "disabled", "enabled"]


def test_an_engine_an_upgrade_a_restart(story: Story, builds: Builds) -> None:
    story.attach()
    story.upgrade(builds.rpm("next"))
    story.restart()


def test_removal_leaves_the_changed_configuration(story: Story) -> None:
    host = story.host
    story.remove()
    story.end()
    assert host.path(f"{CONFIG}.rpmsave").read_text() == story.side.configuration
    assert host.owned() == []
    left = {path for path in host.everything() - story.bare if "weightcache" in path or "wcache" in path}
    assert left == {"/etc/weightcache", f"{CONFIG}.rpmsave"}
