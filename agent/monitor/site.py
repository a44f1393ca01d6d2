"""Which ranks there are on this host, and where their sockets are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weightcache import config as configuration, gpus, nodes, paths, placement
from weightcache.config import Config
from weightcache.errors import AgentUnavailable, ConfigError, WeightcacheError

_FILES = re.compile(r"(\d{1,5})(?:\.status)?\.(?:sock|json)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Site:
    """The configuration that commands go by, where the sockets are, and which of a deployment's nodes this host is.

    ``problem``: why the configuration file could not be used; the agents may serve all the same, so that most
    commands go on with the defaults. ``lost``: why it is not known which node this is. ``gpus`` are this host's, where
    they decide on which GPU a rank is. ``engines``: where launchers of engines with a standby keep their files, None
    where nobody looks for them.
    """

    config: Config
    directory: Path
    problem: ConfigError | None = None
    node: int = 0
    lost: ConfigError | None = None
    gpus: tuple[str, ...] = ()
    engines: Path | None = None

    def rank(self, rank: int) -> paths.RankPaths:
        """The sockets and files of one rank."""
        return paths.RankPaths(self.directory, rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this host is configured for."""
        return () if self.config.path is None or self.lost else placement.of_node(self.config, self.node)

    def gpu(self, rank: int) -> str:
        """The GPU that the rank is configured for, or an empty text."""
        try:
            return placement.place(self.config, rank, lambda: self.gpus).gpu
        except WeightcacheError:
            return ""

    def require_config(self) -> Config:
        """The configuration, or the ConfigError of its file."""
        if self.problem is not None:
            raise self.problem
        return self.config


def open_site(config: Path | None, runtime_dir: Path | None, node: int | None = None) -> Site:
    """Read the configuration: ``config`` if given, which then has to be valid, or the system's, which need not.

    ``node``: which node of the deployment this host is, if somebody says so.
    """
    problem = None
    try:
        found = configuration.load(config)
    except ConfigError as error:
        if config is not None:
            raise
        problem, found = error, Config()
    directory = paths.runtime_dir(runtime_dir, found.agent.runtime_dir)
    lost = None
    try:
        node = nodes.this_node(found.deployment.nodes, node)
    except ConfigError as error:
        node, lost = 0, error
    derived = not found.ranks and found.memory.backend == "cuda"
    engines = paths.runtime_dir(runtime_dir) / "engines"
    return Site(found, directory, problem, node, lost, gpus.installed() if derived else (), engines)


def find_ranks(site: Site) -> list[int]:
    """The configured ranks and those that have a socket or a status file."""
    ranks = set(site.ranks)
    try:
        names = [entry.name for entry in site.directory.iterdir()]
    except OSError:
        names = []
    ranks.update(int(match[1]) for name in names if (match := _FILES.fullmatch(name)))
    return sorted(ranks)


def choose_ranks(site: Site, asked: int | None) -> list[int]:
    """The rank asked for, or all. Raises AgentUnavailable when there is none, ConfigError when nobody knows."""
    ranks = find_ranks(site) if asked is None else [asked]
    if not ranks and site.lost:
        raise site.lost
    if not ranks:
        raise AgentUnavailable(
            f"no agent: {site.directory} holds no socket and no rank is configured (systemctl start weightcache@0?)"
        )
    return ranks
