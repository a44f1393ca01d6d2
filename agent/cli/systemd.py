"""What systemd knows about the units, through `systemctl show`; nothing where there is no systemctl or no systemd."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightcache import paths
from weightcache.monitor.site import Site

SECONDS = 5.0
"""systemd is deaf during a long daemon-reload; nobody waits for it any longer."""

LOADER_SOCKET = "weightcache-loader.socket"
LOADER = "weightcache-loader@doctor.service"
"""Any instance: all have the properties of the template."""

PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "Result", "UnitFileState", "NeedDaemonReload", "NRestarts",
    "NFileDescriptorStore", "FileDescriptorStoreMax", "FileDescriptorStorePreserve", "Restart",
    "RestartPreventExitStatus", "User", "SupplementaryGroups",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unit:
    """One loaded unit and its properties, as text; a property that this version of systemd lacks is empty."""

    name: str
    properties: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.properties.get(name, "")

    @property
    def active(self) -> bool:
        """Whether it runs, or listens."""
        return self["ActiveState"] == "active"

    @property
    def enabled(self) -> bool:
        """Whether a boot starts it."""
        return self["UnitFileState"].startswith("enabled")

    @property
    def state(self) -> str:
        """Its state in systemd's words."""
        return f"{self['ActiveState']} ({self['SubState']})"

    def number(self, name: str) -> int:
        """A property that is a number; 0 when it is none."""
        return int(self[name]) if self[name].isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Units:
    """The units that are installed. ``silent``: systemd is there, and does not answer."""

    found: Mapping[str, Unit] = field(default_factory=dict)
    silent: bool = False

    def service(self, rank: int) -> Unit | None:
        """The agent's unit."""
        return self.found.get(service_name(rank))

    def socket(self, rank: int) -> Unit | None:
        """The unit of the public socket."""
        return self.found.get(f"weightcache@{rank}.socket")

    def warm(self, rank: int) -> Unit | None:
        """The unit that has a rank loaded from boot on."""
        return self.found.get(f"weightcache-warm@{rank}.service")

    @property
    def loader_socket(self) -> Unit | None:
        """The socket at which agents ask for loaders."""
        return self.found.get(LOADER_SOCKET)

    @property
    def loader(self) -> Unit | None:
        """The unit of a loader."""
        return self.found.get(LOADER)


def service_name(rank: int) -> str:
    """The agent's unit."""
    return f"weightcache@{rank}.service"


def of_ranks(site: Site, ranks: Sequence[int]) -> Units:
    """The units of these ranks. Those of the system only: they serve in its own directory, and in no other."""
    if not ranks or site.directory != paths.SYSTEM_RUNTIME_DIR:
        return Units()
    names = [LOADER_SOCKET, LOADER]
    for rank in ranks:
        names += [service_name(rank), f"weightcache@{rank}.socket", f"weightcache-warm@{rank}.service"]
    return _show(names)


def _show(names: Sequence[str]) -> Units:
    program = shutil.which("systemctl")
    if program is None:
        return Units()
    try:
        done = subprocess.run(
            [program, "show", f"--property={','.join(PROPERTIES)}", *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Units(silent=True)
    except OSError:
        return Units()
    if done.returncode:
        return Units()
    found = {}
    for block in done.stdout.decode(errors="replace").split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        name = properties.get("Id", "")
        if name and properties.get("LoadState") in ("loaded", "masked"):
            found[name] = Unit(name, properties)
    return Units(found)
