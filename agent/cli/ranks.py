"""Finding the ranks of this host and talking to their agents."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from weightcache import config as configuration
from weightcache import paths, protocol, records
from weightcache.client import Conversation
from weightcache.config import Config
from weightcache.errors import AgentUnavailable, ConfigError, WeightcacheError
from weightcache.protocol import ErrorInfo, RankReport, RankStatus
from weightcache.text import escape

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")
Runner = Callable[["argparse.Namespace"], int]
Quiet = Callable[[], AbstractContextManager[None]]

ANSWER_SECONDS = 5.0
"""How long an agent may take for an answer that needs no work."""

_MAX_STATUS_FILE = 4 * 2**20
_FILES = re.compile(r"(\d{1,5})(?:\.status)?\.(?:sock|json)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Site:
    """The configuration that commands go by, and where the sockets are.

    ``problem``: why the configuration file could not be used; the agents may serve all the same, so that most
    commands go on with the defaults.
    """

    config: Config
    directory: Path
    problem: ConfigError | None = None

    def rank(self, rank: int) -> paths.RankPaths:
        """The sockets and files of one rank."""
        return paths.RankPaths(self.directory, rank)

    def require_config(self) -> Config:
        """The configuration, or the ConfigError of its file."""
        if self.problem is not None:
            raise self.problem
        return self.config


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of a rank. With ``agent`` down, ``status`` is the last known one (``known_at``) or a blank."""

    status: RankStatus
    agent: Literal["up", "down"]
    reason: WeightcacheError | None = None
    known_at: float | None = None


def open_site(options: argparse.Namespace) -> Site:
    """Read the configuration that the global options name. A file named on the command line has to be valid."""
    problem = None
    try:
        found = configuration.load(options.config)
    except ConfigError as error:
        if options.config is not None:
            raise
        problem, found = error, Config()
    directory = options.runtime_dir or found.agent.runtime_dir or paths.runtime_dir()
    return Site(found, Path(directory), problem)


def warn_of_config(site: Site) -> None:
    """Mention a broken configuration file to an operator whose command works without it."""
    if site.problem is not None:
        print(f"wcache: note: {escape(site.problem.message)}", file=sys.stderr)


def find_ranks(site: Site) -> list[int]:
    """The configured ranks and those that have a socket or a status file."""
    ranks = {entry.rank for entry in site.config.ranks} if site.config.path is not None else set()
    try:
        names = [entry.name for entry in site.directory.iterdir()]
    except OSError:
        names = []
    ranks.update(int(match[1]) for name in names if (match := _FILES.fullmatch(name)))
    return sorted(ranks)


def choose_ranks(site: Site, asked: int | None) -> list[int]:
    """The rank asked for, or all. Raises AgentUnavailable when there is none."""
    ranks = find_ranks(site) if asked is None else [asked]
    if not ranks:
        raise AgentUnavailable(
            f"no agent: {site.directory} holds no socket and no rank is configured (systemctl start weightcache@0?)"
        )
    return ranks


def query(site: Site, rank: int) -> RankView:
    """One rank's state: from its agent, or as last known."""
    try:
        with Conversation(site.rank(rank).status, ANSWER_SECONDS) as agent:
            return RankView(agent.request(protocol.Status(), RankReport, ANSWER_SECONDS).status, "up")
    except WeightcacheError as error:
        reason = error
    known = _last_known(site.rank(rank).status_file)
    if known is None:
        return RankView(_blank(site, rank, ErrorInfo(reason.code, reason.message)), "down", reason)
    status, known_at = known
    if not isinstance(reason, AgentUnavailable):
        # An agent is there and this command cannot talk to it: more telling than what the file says.
        status = dataclasses.replace(status, error=ErrorInfo(reason.code, reason.message))
    return RankView(status, "down", reason, known_at)


def query_all(site: Site, ranks: list[int]) -> list[RankView]:
    """The state of several ranks, asked at the same time."""
    views = []
    for rank, result in each(ranks, lambda rank: query(site, rank)):
        if isinstance(result, Exception):
            raise result
        views.append((rank, result))
    return [view for _, view in sorted(views, key=lambda pair: pair[0])]


def _last_known(file: Path) -> tuple[RankStatus, float] | None:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_STATUS_FILE)
        return records.from_plain(RankStatus, json.loads(data)), file.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None


def _blank(site: Site, rank: int, error: ErrorInfo) -> RankStatus:
    gpu = next((entry.gpu for entry in site.config.ranks if entry.rank == rank), "")
    backend = site.config.memory.backend
    return RankStatus(rank, "unknown", backend, gpu, "", 0, 0.0, "", (), (), None, error, None)


def each(ranks: Iterable[int], action: Callable[[int], T]) -> Iterator[tuple[int, T | Exception]]:
    """Run ``action`` for all ranks at the same time and yield results, or exceptions, as they come.

    The threads are daemons, so that Ctrl-C ends the command while an agent is still busy.
    """
    ranks = list(ranks)
    results: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()

    def run(rank: int) -> None:
        try:
            results.put((rank, action(rank)))
        except Exception as error:  # noqa: BLE001 - handed to the caller, not hidden
            results.put((rank, error))

    for rank in ranks:
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    for _ in ranks:
        yield results.get()


def report(ranks: list[int], action: Callable[[int], str], quiet: Quiet = contextlib.nullcontext) -> int:
    """Run ``action`` for all ranks, print its sentences or errors, and return the exit status (the lowest rank's).

    Everything is printed inside ``quiet()``. A single rank's error is raised.
    """
    failures = {}
    for rank, result in each(ranks, action):
        with quiet():
            if isinstance(result, str):
                # Agents may name their rank themselves.
                print(escape(result if result.startswith(f"rank {rank} ") else f"rank {rank}: {result}"), flush=True)
            elif isinstance(result, WeightcacheError) and len(ranks) > 1:
                print(f"wcache: rank {rank}: {escape(result.message)}", file=sys.stderr)
                failures[rank] = result.exit_status
            else:
                raise result
    return failures[min(failures)] if failures else 0
