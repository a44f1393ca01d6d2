"""Which agent's socket serves which rank or GPU.

The status socket is asked first: it never activates an agent and tells everything. Where nothing answers there, a
Hello on the public socket starts a stopped agent if systemd holds the socket (and never loads a model).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from weightcache import __version__, client, paths, protocol
from weightcache.errors import AgentUnavailable, WeightcacheError
from weightcache.parallel import parallel
from weightcache.paths import RankPaths

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightcache.config import Config, RankConfig

Backend = Literal["host", "cuda"]
STATUS_TIMEOUT = 2.0
HELLO_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent that answered. ``status`` is None where only Hello was answered."""

    rank: int
    path: Path
    backend: str
    gpu_uuid: str
    version: str
    state: str
    status: protocol.RankStatus | None = None


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents that this launch may use, all of one backend, and why others did not answer (by rank)."""

    directory: Path
    backend: Backend
    agents: tuple[Agent, ...] = ()
    problems: tuple[tuple[int, WeightcacheError], ...] = ()

    @property
    def sockets(self) -> dict[str, str]:
        """GPU UUID (cuda) or ``rank:N`` (host) -> path of the public socket, as the engine's directive wants it."""
        if self.backend == "cuda":
            return {agent.gpu_uuid: str(agent.path) for agent in self.agents if agent.gpu_uuid}
        return {f"rank:{agent.rank}": str(agent.path) for agent in self.agents}

    def only(self, ranks: Sequence[RankConfig]) -> Agents:
        """Those that serve ``ranks``, by GPU on the cuda backend, else by number."""
        gpus, numbers = {entry.gpu for entry in ranks}, {entry.rank for entry in ranks}
        cuda = self.backend == "cuda"
        agents = tuple(a for a in self.agents if (a.gpu_uuid in gpus if cuda else a.rank in numbers))
        problems = tuple(entry for entry in self.problems if cuda or entry[0] in numbers)
        return replace(self, agents=agents, problems=problems)

    def missing(self) -> WeightcacheError:
        """Why there is no agent at all."""
        if self.problems:
            rank, error = self.problems[0]
            return type(error)(f"rank {rank}: {error.message}")
        return AgentUnavailable(f"no agent at {self.directory / 'RANK.sock'}")


def directory(option: Path | None, config: Config) -> Path:
    """The runtime directory, by the order of paths.runtime_dir()."""
    return paths.runtime_dir(option, config.agent.runtime_dir)


def discover(where: Path, config: Config, device: str, activate: bool = True) -> Agents:
    """Ask every rank below ``where``. ``device`` is SGLang's --device: only host agents can serve ``cpu``.

    Without ``activate`` a stopped agent is left alone.
    """
    ranks = _ranks(where)
    answers = parallel(
        [partial(_ask, RankPaths(where, rank), activate) for rank in ranks], STATUS_TIMEOUT + HELLO_TIMEOUT + 1
    )
    gpus = {entry.rank: entry.gpu for entry in config.ranks}
    agents: list[Agent] = []
    problems: list[tuple[int, WeightcacheError]] = []
    for rank, answer in zip(ranks, answers, strict=True):
        if isinstance(answer, Agent):
            agents.append(answer if answer.gpu_uuid else replace(answer, gpu_uuid=gpus.get(rank, "")))
        elif isinstance(answer, WeightcacheError):
            problems.append((rank, answer))
        else:
            sock = RankPaths(where, rank).public
            problems.append((rank, AgentUnavailable(f"the agent at {sock} did not answer ({answer!r})")))
    backend: Backend = "host"
    if device != "cpu" and (any(agent.backend == "cuda" for agent in agents) or not agents):
        backend = "cuda"
    chosen = tuple(agent for agent in agents if agent.backend == backend)
    return Agents(where, backend, chosen, tuple(problems))


def _ranks(where: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(where)]
    except OSError:
        return []
    found = {int(m[1]) for name in names if (m := re.fullmatch(r"(\d{1,5})\.(?:sock|status\.sock)", name, re.ASCII))}
    return sorted(found)


def _ask(where: RankPaths, activate: bool) -> Agent:
    try:
        with client.Conversation(where.status, STATUS_TIMEOUT) as conversation:
            status = conversation.request(protocol.Status(), protocol.RankReport, STATUS_TIMEOUT).status
        return Agent(where.rank, where.public, status.backend, status.gpu_uuid, status.version, status.state, status)
    except AgentUnavailable:
        if not activate:
            raise
    with client.Conversation(where.public, HELLO_TIMEOUT) as conversation:
        welcome = conversation.request(protocol.Hello("wcache-launch", __version__), protocol.Welcome, HELLO_TIMEOUT)
    return Agent(where.rank, where.public, welcome.backend, welcome.gpu_uuid, welcome.version, welcome.state)
