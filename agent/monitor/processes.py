"""Processes of this host: what attached engines have beside their leases, and what other users of a GPU are called.

A process that is gone, that nobody may look at, or that has the number of a dead engine is as good as none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from weightcache.commands import shown
from weightcache.monitor.snapshot import Engine
from weightcache.protocol import LeaseStatus

SLACK_SECONDS = 10.0
"""A lease's ``since`` and a process's start are told by different clocks."""

ANCESTORS = 3
"""A scheduler is a child of the server, or of its data parallel controller."""

KEPT_COMMANDS = 1000

_MODULES = ("sglang.launch_server", "weightcache.launch")
_SCRIPTS = ("wcache-launch", "launch_server.py")
_GONE = (psutil.Error, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line of an engine's server: as it is, with secrets that are not to be shown, and for people."""

    argv: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """An attached engine's process, and how its server was started (empty where that could not be found out)."""

    engine: Engine
    launch: Launch


class Processes:
    """Reads /proc through psutil; command lines of living processes are read once."""

    def __init__(self) -> None:
        self._commands: dict[tuple[int, float], str] = {}
        self._launches: dict[tuple[int, float], Launch] = {}

    def engines(self, leases: Iterable[LeaseStatus]) -> tuple[Found, ...]:
        """The processes behind these leases, each once, by number."""
        since: dict[int, float] = {}
        for lease in leases:
            since[lease.pid] = max(lease.since, since.get(lease.pid, 0.0))
        found = [one for pid in sorted(since) if (one := self._engine(pid, since[pid]))]
        self._launches = {(one.engine.pid, one.engine.started): one.launch for one in found}
        return tuple(found)

    def command(self, pid: int) -> str:
        """The command line of a process without secrets; its name where it has none; empty if it is gone."""
        try:
            process = psutil.Process(pid)
            key = (pid, process.create_time())
            if key not in self._commands:
                if len(self._commands) >= KEPT_COMMANDS:
                    self._commands.clear()
                words = process.cmdline()
                while words and not words[-1]:  # where a title was written over the arguments (setproctitle)
                    words.pop()
                self._commands[key] = shown(words or [process.name()])
        except _GONE:
            return ""
        return self._commands[key]

    def _engine(self, pid: int, since: float) -> Found | None:
        if pid <= 0:  # it lives in a process namespace that its agent cannot see
            return None
        try:
            process = psutil.Process(pid)
            started = process.create_time()
            if started > since + SLACK_SECONDS or process.status() == psutil.STATUS_ZOMBIE:
                return None
            memory = process.memory_info()
        except _GONE:
            return None
        launch = self._launches.get((pid, started)) or _launch(process)
        own = max(memory.rss - memory.shared, 0)  # pages of arenas count as shared, however they are mapped
        return Found(Engine(pid, started, own, launch.text), launch)


def _launch(process: psutil.Process) -> Launch:
    """How the server that a scheduler belongs to was started."""
    try:
        candidate: psutil.Process | None = process
        for _ in range(ANCESTORS + 1):
            if candidate is None:
                break
            if _is_server(command := candidate.cmdline()):
                return Launch(tuple(command), shown(command))
            candidate = candidate.parent()
    except _GONE:
        pass
    return Launch((), "")


def _is_server(command: Sequence[str]) -> bool:
    words = command[:8]  # an interpreter, its options, and the module or script
    names = [word.rpartition("/")[2] for word in words]
    if any(word in _MODULES for word in words) or any(name in _SCRIPTS for name in names):
        return True
    return ("sglang", "serve") in itertools.pairwise(names)
