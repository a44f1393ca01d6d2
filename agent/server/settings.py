"""What one agent was started with: the options and the configuration, resolved once and never changed."""

from __future__ import annotations

import grp
import hashlib
import logging
import os
import pwd
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcache import config, paths, placement
from weightcache.config import Config, RankConfig
from weightcache.errors import ConfigError, PermissionRefused, WeightcacheError
from weightcache.protocol import ErrorInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightcache.server.peers import Peer


log = logging.getLogger("weightcache")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    rank: int
    config: Path | None = None
    runtime_dir: Path | None = None
    listen: Path | None = None
    load: bool = False
    loader_socket: Path | None = None
    publish_group: str = ""
    observer: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options and configuration. ``error`` is what is wrong with the configuration: a state, not a reason to exit."""

    rank: int
    paths: paths.RankPaths
    public: Path
    config: Config = field(default_factory=Config)
    error: ErrorInfo | None = None
    gpu: str = ""
    gid: int | None = None
    publishers: frozenset[int] = frozenset()
    publish_gid: int | None = None
    load: bool = False
    loader_socket: Path | None = None
    observer: int | None = None
    """A user that may see the status, and nothing else."""

    @property
    def model(self) -> str:
        """The configured model as its arguments name it, or an empty text."""
        return model_in(self.config.model.arguments) if self.config.model else ""

    @property
    def node(self) -> int:
        """This host's number among the nodes of the deployment."""
        deployment = self.config.deployment
        return deployment.node_of(self.rank) if self.rank in deployment.ranks else 0

    @property
    def launch(self) -> tuple[int, ...]:
        """The ranks of this host that are loaded together with this one, itself included; the first one leads."""
        deployment = self.config.deployment
        return tuple(deployment.launch_of(self.rank)) if self.rank in deployment.ranks else (self.rank,)

    @property
    def kinship(self) -> str:
        """A digest of what the agents of one launch must have in common."""
        config = self.config
        common = (config.model, config.deployment, config.memory, config.loader, config.policy.unproven)
        return hashlib.sha256(repr(common).encode()).hexdigest()[:16]

    def may_operate(self, peer: Peer) -> bool:
        """Whether the peer may evict, drain, resume and verify."""
        return peer.uid in (0, os.geteuid())

    def may_publish(self, peer: Peer) -> bool:
        """Whether the peer may hand over weights."""
        return self.may_operate(peer) or peer.uid in self.publishers

    def only_observes(self, peer: Peer) -> bool:
        """Whether the peer may only look."""
        return peer.uid == self.observer and not self.may_operate(peer)

    def require_operator(self, peer: Peer, what: str) -> None:
        """Raise PermissionRefused unless the peer may do ``what``."""
        if not self.may_operate(peer):
            raise PermissionRefused(f"only root and the agent's own user may {what}, not uid {peer.uid}")


def resolve(options: Options) -> Settings:
    """Read the configuration; whatever is wrong with it ends up in ``error``."""
    try:
        chosen, error = config.load(options.config), None
    except ConfigError as problem:
        chosen, error = Config(), ErrorInfo(problem.code, problem.message)
    problems = [error.message] if error else []
    place = RankConfig(options.rank)
    if not problems:
        try:
            place = placement.place(chosen, options.rank)
        except WeightcacheError as problem:
            problems.append(problem.message)
    gid = _group(f"{_name(chosen)}: [agent] socket_group", chosen.agent.socket_group, problems)
    publish_gid = _group("--publish-group", options.publish_group, problems)
    publishers = _users(chosen, problems)
    directory = paths.runtime_dir(options.runtime_dir, chosen.agent.runtime_dir)
    places = paths.RankPaths(directory.absolute(), options.rank)
    return Settings(
        rank=options.rank,
        paths=places,
        public=options.listen or places.public,
        config=chosen,
        error=ErrorInfo(ConfigError.code, "; ".join(problems)) if problems else None,
        gpu=place.gpu,
        gid=gid,
        publishers=publishers,
        publish_gid=publish_gid,
        load=options.load,
        loader_socket=options.loader_socket,
        observer=_observer(options.observer),
    )


def model_in(arguments: Sequence[str]) -> str:
    """The value of --model-path (or --model) among SGLang's arguments, or an empty text."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--model-path", "--model"):
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return ""


def _name(chosen: Config) -> str:
    return str(chosen.path or paths.CONFIG_FILE)


def _group(where: str, name: str, problems: list[str]) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        problems.append(f"{where}: there is no group {name!r}")
        return None


def _users(chosen: Config, problems: list[str]) -> frozenset[int]:
    uids = set()
    for name in chosen.policy.publishers:
        try:
            uids.add(uid_of(name))
        except KeyError:
            problems.append(f"{_name(chosen)}: [policy] publishers: there is no user {name!r}")
    return frozenset(uids)


def _observer(name: str) -> int | None:
    try:
        return uid_of(name) if name else None
    except KeyError:  # who is not there is not waited for
        log.warning("--observer: there is no user %r", name)
        return None


def uid_of(name: str) -> int:
    """The uid of a user given by name or by decimal uid. Raises KeyError."""
    return int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid
