"""On which GPU a rank's weights live: by its [[rank]] table, or derived from [deployment] and the GPUs of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache import gpus, paths
from weightcache.config import RankConfig
from weightcache.errors import ConfigError, DeviceUnavailable
from weightcache.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightcache.config import Config


def of_node(config: Config, node: int) -> tuple[int, ...]:
    """The ranks of one host, in their order. [[rank]] tables that are another host's do not count."""
    here = config.deployment.of_node(node)
    if not config.ranks:
        return tuple(here)
    alone = config.deployment.node_count == 1
    return tuple(sorted(entry.rank for entry in config.ranks if alone or entry.rank in here))


def place(config: Config, rank: int, find: Callable[[], tuple[str, ...]] = gpus.installed) -> RankConfig:
    """The rank with its GPU, looked up on this host, which has to be the rank's.

    Raises ConfigError for a rank that is not configured, DeviceUnavailable for a GPU that is not there.
    """
    if config.ranks:
        for entry in config.ranks:
            if entry.rank == rank:
                return entry
        raise ConfigError(f"{config.path or paths.CONFIG_FILE}: no [[rank]] table has rank = {rank}")
    if rank not in config.deployment.ranks:
        last = config.deployment.ranks[-1]
        raise ConfigError(f"{config.path}: [deployment] has ranks 0 to {last}, not {rank}")
    if config.memory.backend == "host":
        return RankConfig(rank)
    return RankConfig(rank, _gpu(config, rank, find()))


def place_all(
    config: Config, ranks: Iterable[int], find: Callable[[], tuple[str, ...]] = gpus.installed
) -> tuple[RankConfig, ...]:
    """Several ranks of this host; it is asked once for its GPUs. Raises as ``place`` does."""
    found = find() if not config.ranks and config.memory.backend == "cuda" else ()
    return tuple(place(config, rank, lambda: found) for rank in ranks)


def _gpu(config: Config, rank: int, found: tuple[str, ...]) -> str:
    index = config.deployment.gpu_index(rank)
    if index >= len(found):
        raise DeviceUnavailable(f"rank {rank} would be on GPU {index}, and this host shows {count(len(found), 'GPU')}")
    if not found[index]:
        raise DeviceUnavailable(
            f"rank {rank} would be on GPU {index}, whose UUID the driver does not know yet: run nvidia-smi -L, and "
            "enable nvidia-persistenced"
        )
    return found[index]
