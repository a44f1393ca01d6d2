"""Records for tests, and fake agents that are watched."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from weightcache import paths, protocol, transport
from weightcache.config import Config
from weightcache.fingerprint import Fingerprint
from weightcache.monitor.site import Site
from weightcache.monitor.snapshot import Device, DeviceProcess, Engine, RankEvent, Snapshot
from weightcache.monitor.view import RankView
from weightcache.protocol import (
    ErrorInfo,
    Happening,
    LeaseStatus,
    LoadProgress,
    Observed,
    RankReport,
    RankStatus,
    SetStatus,
)

GPU = "GPU-00000000-1111-2222-3333-444444444444"


def fingerprint() -> Fingerprint:
    kinds = {"int": 1, "str": "x"}
    return Fingerprint(**{field.name: kinds[str(field.type)] for field in dataclasses.fields(Fingerprint)})


def lease(pid: int = 4711, **changes: Any) -> LeaseStatus:
    base = LeaseStatus(f"l{pid}", pid, 0, "sglang.service", "python -m sglang.launch_server", time.time() - 61)
    return dataclasses.replace(base, **changes)


def weight_set(**changes: Any) -> SetStatus:
    base = SetStatus(
        id="s1abcd",
        role="target",
        model="/models/small",
        revision="",
        version=1,
        bytes=16_400_000_000,
        arenas=1,
        tensors=213,
        fingerprint=fingerprint(),
        digest="0" * 32,
        published_at=time.time() - 3600,
        load_seconds=12.3,
        bytes_read=16_400_000_000,
        leases=(),
    )
    return dataclasses.replace(base, **changes)


def status(rank: int = 0, state: str = "ready", **changes: Any) -> RankStatus:
    base = RankStatus(
        rank=rank,
        state=state,
        backend="host",
        gpu_uuid="",
        version="0.1.0",
        pid=1,
        uptime_seconds=5.0,
        model="/models/small",
        sets=(weight_set(),) if state == "ready" else (),
        orphans=(),
        progress=LoadProgress("loading", 5_000_000_000, 16_400_000_000, 12.0) if state == "loading" else None,
        error=ErrorInfo("load-failed", "the loader was killed by signal 9") if state == "failed" else None,
        drained=None,
    )
    return dataclasses.replace(base, **changes)


def view(found: RankStatus | None = None, **changes: Any) -> RankView:
    return dataclasses.replace(RankView(found or status(), "up", None, time.time()), **changes)


def on_gpu(rank: int = 0, uuid: str = GPU, **changes: Any) -> RankView:
    return view(status(rank, backend="cuda", gpu_uuid=uuid, **changes))


def device(uuid: str = GPU, *processes: DeviceProcess, **changes: Any) -> Device:
    base = Device(uuid, 0, "NVIDIA H200", 150_000_000_000, 120_000_000_000, 30_000_000_000, processes)
    return dataclasses.replace(base, **changes)


def engine(pid: int = 4711, **changes: Any) -> Engine:
    return dataclasses.replace(
        Engine(pid, time.time() - 70, 3_000_000_000, "python -m sglang.launch_server"), **changes
    )


def snapshot(*ranks: RankView, **changes: Any) -> Snapshot:
    base = Snapshot(time.time(), "a-host", "0.1.0", "580.1", "", ranks, (), (), ())
    return dataclasses.replace(base, **changes)


def happening(serial: int, **changes: Any) -> Happening:
    return dataclasses.replace(Happening(serial, 1e9 + serial, "leased", "info", f"event {serial}"), **changes)


def rank_event(rank: int, serial: int) -> RankEvent:
    return RankEvent(rank, happening(serial))


def site(directory: Path, config: Config | None = None) -> Site:
    return Site(config or Config(), directory)


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.01)
    return value


Script = Callable[["Watched", socket.socket], None]


class Watched:
    """An agent that answers Status and Watch with ``status``, and does ``script`` with every connection if it has one.

    ``say`` tells all watchers something. ``connections`` counts those that there ever were.
    """

    def __init__(self, directory: Path, rank: int = 0, script: Script | None = None) -> None:
        self.rank = rank
        self.status = status(rank)
        self.events: tuple[Happening, ...] = ()
        self.connections = 0
        self.asked: list[protocol.Message] = []
        self.script = script
        self._watchers: list[socket.socket] = []
        self._path = paths.RankPaths(directory, rank).status
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def say(self, found: RankStatus | None = None, *events: Happening) -> None:
        self.status = found or self.status
        for watcher in self._watchers:
            with contextlib.suppress(OSError):
                self.send(watcher, Observed(self.status, events))

    @staticmethod
    def send(connection: socket.socket, *messages: protocol.Message) -> None:
        for message in messages:
            transport.send_packet(connection, protocol.encode(message))

    def hang_up(self) -> None:
        """End all conversations, but go on listening."""
        for watcher in self._watchers:
            with contextlib.suppress(OSError):
                watcher.shutdown(socket.SHUT_RDWR)
        self._watchers.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self.hang_up()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._watchers.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while (packet := transport.receive_packet(connection)).data:
                message = protocol.decode(packet.data)
                self.asked.append(message)
                if self.script is not None:
                    self.script(self, connection)
                elif isinstance(message, protocol.Watch):
                    self.send(connection, Observed(self.status, self.events))
                else:
                    self.send(connection, RankReport(self.status))


class Still:
    """A source of snapshots that were made before; the last one stays."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.left = list(snapshots)
        self.paces: list[float] = []
        self.closed = False

    def snapshot(self) -> Snapshot:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def pace(self, seconds: float) -> None:
        self.paces.append(seconds)

    def close(self) -> None:
        self.closed = True


def numbered(moments: Sequence[float]) -> list[Snapshot]:
    return [snapshot(view(status(i)), at=moment) for i, moment in enumerate(moments)]
