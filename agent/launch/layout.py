"""Which ranks of a launch live on this host, and on which GPUs: SGLang's own rules, as far as arguments show them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from weightcache.config import RankConfig
from weightcache.deployment import Deployment, LayoutError
from weightcache.errors import DeviceUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightcache.sglang_options import Given

_TIMEOUT = 30.0
_MOST_NODES = 65536


def deployment(given: Given) -> Deployment:
    """The layout that arguments ask for; nodes have no names there. Raises UsageError for one that cannot be."""
    sizes = {name: _number(given, name, 1) for name in ("tp_size", "pp_size", "dp_size", "ep_size", "gpu_id_step")}
    attention = _number(given, "attn_dp_size", 1)
    if attention > 1:
        if sizes["dp_size"] not in (1, attention):
            raise UsageError("--attn-dp-size and --dp-size together are a layout that weightcache does not know")
        sizes["dp_size"] = attention
    made = Deployment(
        **sizes,
        attention_dp=attention > 1 or given.flag("enable_dp_attention"),
        nodes=tuple(f"node-{node}" for node in range(min(_number(given, "nnodes", 1), _MOST_NODES))),
        base_gpu_id=_number(given, "base_gpu_id", 0),
        follow=True,
    )
    try:
        made.check()
    except LayoutError as error:
        option = "--nnodes" if error.key == "nodes" else f"--{error.key.replace('_', '-')}"
        raise UsageError(f"{option}: {error.text}") from None
    return made


def ranks(given: Given) -> range:
    """The global ranks of this host, those of all replicas. Raises UsageError."""
    layout, node = deployment(given), _number(given, "node_rank", 0)
    if not 0 <= node < layout.node_count:
        raise UsageError(f"--node-rank {node}: there are {layout.node_count} nodes, from 0")
    return layout.of_node(node)


def reporting(given: Given) -> int:
    """How many ranks on this host SGLang tells apart: replicas have the same ones. Raises UsageError."""
    here = ranks(given)
    return len(deployment(given).launch_of(here[0]))


def rank_configs(given: Given, environment: Mapping[str, str] = os.environ) -> tuple[str, tuple[RankConfig, ...]]:
    """The memory backend and this host's ranks with their GPUs. Raises UsageError or DeviceUnavailable.

    In host memory, replicas share the ranks of the first one.
    """
    device = given.text("device")
    if device not in ("", "cuda", "cpu"):
        raise UsageError(f"weightcache holds weights in CUDA or host memory, not on --device {device}")
    layout, here = deployment(given), ranks(given)
    gpus = [] if device == "cpu" else visible(all_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if device == "cuda":
            raise DeviceUnavailable("--device cuda, but nvidia-smi shows no GPU that this launch may use")
        return "host", tuple(RankConfig(rank) for rank in layout.launch_of(here[0]))
    chosen = []
    for rank in here:
        index = layout.gpu_index(rank)
        if index >= len(gpus):
            raise DeviceUnavailable(f"rank {rank} would be on GPU {index}, but there are {len(gpus)}")
        chosen.append(RankConfig(rank, gpus[index]))
    return "cuda", tuple(chosen)


def _number(given: Given, name: str, default: int) -> int:
    number = given.number(name, default)
    if number is None:
        raise UsageError(f"--{name.replace('_', '-')} {given.text(name)!r} is no such number")
    return number


def all_gpus() -> list[str]:
    """The UUIDs of this host's GPUs in nvidia-smi's order; empty without a driver."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip().startswith(("GPU-", "MIG-"))]


def visible(gpus: list[str], chosen: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order: ordinals or (beginnings of) UUIDs, up to a bad one."""
    if chosen is None:
        return gpus
    result: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isascii() and entry.isdigit():
            matches = gpus[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            matches = [entry]
        else:
            matches = [gpu for gpu in gpus if entry and gpu.lower().startswith(entry.lower())]
        if len(matches) != 1:  # CUDA stops at the first entry that it does not understand
            break
        result += matches
    return result
