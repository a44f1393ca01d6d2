"""A host on which a package is still to be installed: a bare system with a real systemd, and as always no network.

`apt install ./PACKAGE` takes what else it needs from the index and the archive of Debian's own repository that
tests/env/package.sh left in the root.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tests.support.environments import REPOSITORY
from tests.systemd.machine import Machine

# boot.sh presets the units of a staged tree. None is there yet, so these stand in, in a /run that the boot empties.
_STANDINS = {
    f"/run/systemd/system/{unit}": "[Unit]\nDescription=none yet\n"
    for unit in ("weightcache.target", "weightcache-loader.socket")
}
_USERS = {"/usr/lib/sysusers.d/test.conf": "u member\n"}
MEMBERS = "/etc/sysusers.d/members.conf"
UNITS = ("weightcache*",)
INSTALL_SECONDS = 300.0
CHECKOUT = f"/{REPOSITORY.parts[1]}"
"""Below this the checkout is to be seen on a host, too."""
NOT_OURS = ("/proc", "/sys", "/dev", "/run", "/tmp", CHECKOUT, "/var/log", "/var/tmp", "/root")


class Host(Machine):
    """A machine with nothing installed; ``readable`` as there."""

    def __init__(self, root: str, empty: Path, readable: Sequence[Path]) -> None:
        super().__init__(root, empty, files={**_STANDINS, **_USERS}, readable=readable)

    @abstractmethod
    def install(self, package: Path) -> str:
        """Install a package with what it depends on, or upgrade to it; what was said."""

    @abstractmethod
    def remove(self) -> str:
        """Remove weightcache."""

    def join(self, group: str) -> None:
        """Make the user `member` one of the group's."""
        self.write_file(MEMBERS, f"m member {group}\n")
        self.run("systemd-sysusers")

    def units(self) -> list[str]:
        """Units of weightcache that are loaded in any state but dead."""
        listed = self.systemctl("list-units", "--all", "--plain", "--no-legend", *UNITS).splitlines()
        return [line.split()[0] for line in listed if "inactive" not in line.split()]

    def links(self) -> list[str]:
        """Links below /etc/systemd, enabled units for instance, that lead nowhere or to weightcache."""
        script = "find /etc/systemd -xtype l; find /etc/systemd -name '*weightcache*' -type l"
        return self.run("sh", "-c", script).stdout.split()

    def everything(self) -> set[str]:
        """Everything on the host's own file system, but logs, package managers' own data and this test's folders."""
        pruned = " -o ".join(f"-path {path}" for path in (*NOT_OURS, "/var/lib/dpkg", "/var/lib/apt", "/var/cache/apt"))
        return set(self.run("sh", "-c", f"find / -xdev \\( {pruned} \\) -prune -o -print").stdout.splitlines())

    def owned(self) -> list[str]:
        """Files of weightcache's users, and of nobody."""
        users = [f"-user {user}" for user in ("weightcache", "weightcache-loader", "weightcache-exporter")]
        groups = [f"-group {group}" for group in ("weightcache", "weightcache-loader", "weightcache-publish")]
        tests = " -o ".join([*users, *groups, "-nouser", "-nogroup"])
        pruned = " -o ".join(f"-path {path}" for path in ("/proc", CHECKOUT, "/root", "/tmp"))
        script = f"find / -xdev \\( {pruned} \\) -prune -o \\( {tests} \\) -print; find /run \\( {tests} \\)"
        return self.run("sh", "-c", script).stdout.split()


class AptHost(Host):
    """A Debian, ``root`` is "packages-12" or "packages-13"."""

    def install(self, package: Path) -> str:
        """As documented."""
        return self.apt("install", package)

    def remove(self) -> str:
        """Its configuration stays."""
        return self.apt("remove", "weightcache")

    def purge(self) -> str:
        """All of it, and what came with it."""
        return self.apt("purge", "weightcache") + self.apt("purge", "--autoremove")

    def apt(self, *arguments: str | Path) -> str:
        """Run apt-get and return what it said."""
        quietly = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", "--quiet=2")
        done = self.run(*quietly, *arguments, timeout=INSTALL_SECONDS)
        return done.stdout + done.stderr


class DnfHost(Host):
    """A host with dnf.

    No repository of a distribution with rpm can be reached, so ``repository`` stands in, with stubs of what the package
    depends on. The rpm, its scripts and the dependency solver are real; python3, psutil and systemd are Debian's.
    """

    def __init__(self, empty: Path, readable: Sequence[Path], repository: Path) -> None:
        super().__init__("packages", empty, readable)
        self.repository = repository

    def install(self, package: Path) -> str:
        """As documented."""
        return self.dnf("install", package)

    def remove(self) -> str:
        """Its changed configuration stays, as .rpmsave."""
        return self.dnf("remove", "weightcache")

    def dnf(self, *arguments: str | Path, check: bool = True) -> str:
        """Run dnf with the repository of stubs alone, and return what it said."""
        source = f"--repofrompath=stubs,file://{self.repository}"
        done = self.run(
            *("dnf", "--assumeyes", "--disablerepo=*", source, "--nogpgcheck", *arguments),
            check=check,
            timeout=INSTALL_SECONDS,
        )
        return done.stdout + done.stderr
