"""All facts together."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import pytest

from tests.unit.monitor import made
from weightcache.monitor import gather as module
from weightcache.monitor.gather import Gathering
from weightcache.monitor.host import Facts
from weightcache.monitor.nvml import Reading
from weightcache.monitor.processes import Found, Launch
from weightcache.monitor.requests import Address, Load


class Fakes:
    """NVML, processes and requests that answer what they are told to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.reading = Reading("580", "", (made.device(),))
        self.launch = Launch(("s", "--port", "31000"), "s --port 31000")
        self.loads: dict[Address, Load | None] = {Address("127.0.0.1", 31000): Load(3, 1)}

    def gathering(self, patience: float = 0.0) -> Gathering:
        return Gathering(patience, self, self, self)  # type: ignore[arg-type]

    def read(self, uuids: Any, command: Any) -> Reading:
        self.asked.append(list(uuids))
        return self.reading

    def engines(self, leases: Any) -> tuple[Found, ...]:
        return tuple(Found(made.engine(lease.pid), self.launch) for lease in leases)

    def command(self, pid: int) -> str:
        return f"command of {pid}"

    def now(self, servers: Any, patience: float) -> dict[Address, Load | None]:
        self.asked.append((sorted(set(servers)), patience))
        return {server: self.loads.get(server) for server in servers}


def test_facts_about_gpus() -> None:
    fakes = Fakes()
    engine = made.on_gpu(sets=(made.weight_set(leases=(made.lease(10),)),), orphans=(made.lease(11),))
    facts = fakes.gathering(0.5)([engine, made.on_gpu(1), made.on_gpu(2, "MIG-1")])
    assert fakes.asked == [([Address("127.0.0.1", 31000)], 0.5), [made.GPU, "MIG-1"]]
    assert (facts.driver, facts.problem, facts.devices) == ("580", "", (made.device(),))
    assert [(e.pid, e.running, e.waiting) for e in facts.engines] == [(10, 3, 1), (11, 3, 1)]


def test_the_hosts_memory_is_a_device() -> None:
    fakes = Fakes()
    fakes.reading = Reading()
    rank = made.view(made.status(sets=(made.weight_set(leases=(made.lease(10),)),)))
    [device] = fakes.gathering()([rank]).devices
    assert (device.uuid, device.index, device.name) == ("", -1, "host memory")
    assert device.total == psutil.virtual_memory().total
    assert device.used + device.free == device.total
    assert [(p.pid, p.command, p.bytes) for p in device.processes] == [(10, "command of 10", 3_000_000_000)]


def test_a_rank_of_which_nothing_is_known_has_no_device() -> None:
    fakes = Fakes()
    fakes.reading = Reading()
    assert fakes.gathering()([made.view(made.status(state="unknown", backend="cuda"), agent="down")]) == Facts()
    assert fakes.asked[-1] == []


def test_engines_that_do_not_say() -> None:
    fakes = Fakes()
    rank = made.view(made.status(sets=(made.weight_set(leases=(made.lease(10),)),)))
    fakes.loads = {}
    assert fakes.gathering()([rank]).engines[0].running is None
    fakes.launch = Launch((), "")
    assert fakes.gathering()([rank]).engines[0].running is None
    assert fakes.asked[-2][0] == []


def test_an_engine_of_another_network_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes()
    monkeypatch.setattr(module, "_same_network", lambda pid: pid == 10)
    leases = (made.lease(10), made.lease(11))
    engines = fakes.gathering()([made.view(made.status(sets=(made.weight_set(leases=leases),)))]).engines
    assert [engine.running for engine in engines] == [3, None]


def test_networks() -> None:
    assert module._same_network(os.getpid())
    assert module._same_network(2**22 + 1)  # nobody knows


def test_the_real_thing() -> None:
    own = made.lease(os.getpid(), since=time.time())
    rank = made.view(made.status(sets=(made.weight_set(leases=(own,)),)))
    facts = Gathering()([rank])
    assert (facts.driver, facts.problem) == ("", "")
    assert facts.devices[0].processes[0].pid == facts.engines[0].pid == os.getpid()
