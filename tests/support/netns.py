"""Two hosts on this machine: network namespaces with a cable between them, each with shared memory of its own.

By its shared memory SGLang finds out which ranks are on the same host. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "wctest"
NETWORK = "10.213.77"
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. ``command`` comes before the command that is to run there."""

    name: str
    address: str

    @property
    def command(self) -> tuple[str, ...]:
        """Runs what follows on this host. The process keeps its number; its mounts are its own, and end with it."""
        mounted = 'mount -t tmpfs shm /dev/shm && exec "$@"'
        return ("ip", "netns", "exec", self.name, "sh", "-c", mounted, "sh")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else. What runs there has to be ended before."""
    _remove_leftovers()
    number = next(_count)
    hosts = tuple(Host(f"{PREFIX}-{os.getpid()}-{number}-{end}", f"{NETWORK}.{end}") for end in (1, 2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        ends = [("eth1", "netns", host.name) for host in hosts]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth1")
            for device in ("lo", "eth1"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


def _remove_leftovers() -> None:
    """Those of a run that was killed: their names say whose they are."""
    for entry in Path("/run/netns").glob(f"{PREFIX}-*") if Path("/run/netns").is_dir() else ():
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\d", entry.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", entry.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
