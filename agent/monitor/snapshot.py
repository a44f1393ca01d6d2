"""One moment of this host as an observer sees it: what the screen shows, what is recorded, what metrics are made of.

Everything in it is data of unknown origin (paths, commands, sentences of agents): escape it before a terminal sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from weightcache import records
from weightcache.monitor import view
from weightcache.monitor.view import RankView
from weightcache.protocol import Happening
from weightcache.standby.listing import EngineView

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that uses a device's memory, and how many bytes of its own; None where nobody may know.

    The arenas that an engine maps are not among its own bytes: they belong to the rank.
    """

    pid: int
    command: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Device:
    """The memory that a rank's weights live in: a GPU, a MIG slice, or this host's (with an empty ``uuid``).

    ``total``, ``used`` and ``free`` are bytes; what the driver keeps for itself counts as used.
    ``index`` is NVML's (-1 for a MIG slice or the host).
    """

    uuid: str
    index: int
    name: str
    total: int
    used: int
    free: int
    processes: tuple[DeviceProcess, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """What this host knows of an attached engine's process beside its lease.

    ``resident`` is its own host memory in bytes (shared arenas excluded). ``running`` and ``waiting`` are requests;
    None where the engine's server does not say. ``launch`` is the server's command line, where it could be read.
    """

    pid: int
    started: float
    resident: int
    launch: str
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event of one rank's journal."""

    rank: int
    happened: Happening


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything, at the time ``at`` (seconds since the epoch): ages are to be told against it, not against a clock.

    ``driver`` is the NVIDIA driver's version, or empty; ``problem`` says why device facts are missing, or what is
    wrong with the configuration file. ``events`` are the latest ones, oldest first. ``engines`` are attached processes,
    ``standby`` the engines that have two slots, attached or not.
    """

    at: float
    host: str
    version: str
    driver: str
    problem: str
    ranks: tuple[RankView, ...]
    devices: tuple[Device, ...]
    engines: tuple[Engine, ...]
    events: tuple[RankEvent, ...]
    standby: tuple[EngineView, ...] = ()
    schema: int = SCHEMA

    def device(self, uuid: str) -> Device | None:
        """The device with that UUID; the host's memory for an empty one."""
        return next((device for device in self.devices if device.uuid == uuid), None)

    def engine(self, pid: int) -> Engine | None:
        """What is known of that process."""
        return next((engine for engine in self.engines if engine.pid == pid), None)


class Source(Protocol):
    """Where snapshots come from: the living host, or a recording."""

    def snapshot(self) -> Snapshot:
        """The latest one; never waits."""
        ...

    def pace(self, seconds: float) -> None:
        """Gather every so many seconds from now on."""
        ...

    def close(self) -> None:
        """End whatever gathers. Waits at most a moment."""
        ...


def plain(snapshot: Snapshot) -> dict[str, Any]:
    """The JSON of ``wcache-top``: that of ``wcache status`` with the devices, processes and events beside the ranks."""
    whole: dict[str, Any] = records.to_plain(snapshot)
    whole["ranks"] = [view.plain(rank) for rank in snapshot.ranks]
    return {"schema": whole.pop("schema"), **whole}
