"""Which ranks there are on this host, and where their sockets are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weightcache import config as configuration, paths
from weightcache.config import Config
from weightcache.errors import AgentUnavailable, ConfigError

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


def open_site(config: Path | None, runtime_dir: Path | None) -> Site:
    """Read the configuration: ``config`` if given, which then has to be valid, or the system's, which need not."""
    problem = None
    try:
        found = configuration.load(config)
    except ConfigError as error:
        if config is not None:
            raise
        problem, found = error, Config()
    directory = runtime_dir or found.agent.runtime_dir or paths.runtime_dir()
    return Site(found, Path(directory), problem)


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
