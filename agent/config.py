"""weightcache.toml as frozen values. (The reader is below; see docs/weightcache.toml for a commented example.)"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """[agent]: where sockets live, and the group whose members may attach (empty: leave the group alone)."""

    runtime_dir: Path | None = None
    socket_group: str = ""


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """[loader]: the command that runs weightcache.loader in the operator's SGLang environment, and its limits.

    ``timeout_seconds`` bounds one load; ``stall_seconds`` is how long a loader may show no progress (bytes, CPU time
    or I/O). ``environment`` is added to the loader's environment.
    """

    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timeout_seconds: float = 7200.0
    stall_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """[model]: the SGLang arguments of the model to hold, exactly as sglang.launch_server takes them."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """[memory]: ``cuda`` or ``host``; ``arena_bytes`` 0 chooses by the size of the set."""

    backend: Literal["cuda", "host"] = "cuda"
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """[policy]: what clients may do. ``publishers`` are user names that may donate, besides root and the agent's."""

    clients_may_evict_unleased: bool = False
    donation: bool = True
    publishers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankConfig:
    """[[rank]]: one rank of this host and the UUID of its GPU (empty on the host backend)."""

    rank: int
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file."""

    agent: AgentConfig = AgentConfig()
    loader: LoaderConfig = LoaderConfig()
    model: ModelConfig | None = None
    memory: MemoryConfig = MemoryConfig()
    policy: PolicyConfig = PolicyConfig()
    ranks: tuple[RankConfig, ...] = (RankConfig(0),)
    path: Path | None = None
