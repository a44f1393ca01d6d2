"""The facts about this host that no agent knows, put together from NVML, psutil and the engines' own servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import psutil

from weightcache.monitor.host import Facts
from weightcache.monitor.nvml import Nvml
from weightcache.monitor.processes import Found, Processes
from weightcache.monitor.requests import Address, Requests, address
from weightcache.monitor.snapshot import Device, DeviceProcess, Engine
from weightcache.monitor.view import RankView
from weightcache.protocol import LeaseStatus

_GPU = ("GPU-", "MIG-")


class Gathering:
    """A ``Gather``. ``patience``: how many seconds the first answer of an engine is waited for."""

    def __init__(
        self,
        patience: float = 0.0,
        nvml: Nvml | None = None,
        processes: Processes | None = None,
        requests: Requests | None = None,
    ) -> None:
        self._patience = patience
        self._nvml = nvml or Nvml()
        self._processes = processes or Processes()
        self._requests = requests or Requests()

    def __call__(self, ranks: Sequence[RankView]) -> Facts:
        """The facts about the devices and the engines of these ranks."""
        found = self._processes.engines(lease for rank in ranks for lease in _leases(rank))
        engines = self._with_requests(found)
        gpus = dict.fromkeys(rank.status.gpu_uuid for rank in ranks if rank.status.gpu_uuid.startswith(_GPU))
        reading = self._nvml.read(gpus, self._processes.command)
        devices = reading.devices
        on_host = {lease.pid for rank in ranks if _on_host(rank) for lease in _leases(rank)}
        if any(map(_on_host, ranks)):
            devices = (*devices, self._host_memory([engine for engine in engines if engine.pid in on_host]))
        return Facts(reading.driver, reading.problem, devices, engines)

    def _with_requests(self, found: Sequence[Found]) -> tuple[Engine, ...]:
        servers: dict[int, Address] = {}
        for one in found:
            server = address(one.launch.argv)
            if server is not None and _same_network(one.engine.pid):
                servers[one.engine.pid] = server
        loads = self._requests.now(servers.values(), self._patience)
        engines = []
        for one in found:
            server = servers.get(one.engine.pid)
            load = loads[server] if server else None
            engines.append(
                dataclasses.replace(one.engine, running=load.running, waiting=load.waiting) if load else one.engine
            )
        return tuple(engines)

    def _host_memory(self, engines: Sequence[Engine]) -> Device:
        """This host's memory as a device; shared memory, and so every arena, counts as used."""
        memory = psutil.virtual_memory()
        users = tuple(
            DeviceProcess(engine.pid, self._processes.command(engine.pid), engine.resident) for engine in engines
        )
        return Device("", -1, "host memory", memory.total, memory.total - memory.available, memory.available, users)


def _leases(rank: RankView) -> list[LeaseStatus]:
    return [*(lease for entry in rank.status.sets for lease in entry.leases), *rank.status.orphans]


def _on_host(rank: RankView) -> bool:
    return rank.status.backend == "host" and not rank.status.gpu_uuid


def _same_network(pid: int) -> bool:
    """Whether a process listens where this one connects; where nobody may know, it is taken to.

    An engine in a container of its own network would otherwise be shown with the requests of another one.
    """
    try:
        return Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net")
    except OSError:
        return True
