"""Which ranks of a launch live on this host, and on which GPUs: SGLang's own rules, as far as arguments show them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from weightcache.config import RankConfig
from weightcache.errors import DeviceUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightcache.launch.sglang_options import Given

_TIMEOUT = 30.0


def ranks(given: Given) -> range:
    """The global ranks (pp_rank * tp_size + tp_rank) of this host. Raises UsageError."""
    sizes = {name: given.number(name, 1) for name in ("tp_size", "pp_size", "nnodes")}
    sizes["node_rank"] = given.number("node_rank", 0)
    for name, size in sizes.items():
        if size is None or size < (0 if name == "node_rank" else 1):
            raise UsageError(f"--{name.replace('_', '-')} {given.text(name)!r} is no such number")
    world = (sizes["tp_size"] or 1) * (sizes["pp_size"] or 1)
    nodes, node = sizes["nnodes"] or 1, sizes["node_rank"] or 0
    if world % nodes or node >= nodes:
        raise UsageError(f"{world} ranks on {nodes} nodes, of which this is node {node}, make no layout")
    local = world // nodes
    return range(node * local, (node + 1) * local)


def rank_configs(given: Given, environment: Mapping[str, str] = os.environ) -> tuple[str, tuple[RankConfig, ...]]:
    """The memory backend and this host's ranks with their GPUs. Raises UsageError or DeviceUnavailable."""
    device = given.text("device")
    if device not in ("", "cuda", "cpu"):
        raise UsageError(f"weightcache holds weights in CUDA or host memory, not on --device {device}")
    here = ranks(given)
    attention_dp = given.flag("enable_dp_attention") or "attn_dp_size" in given.values
    if (given.number("dp_size", 1) or 1) > 1 and not attention_dp:
        raise UsageError("daemon mode starts one agent a rank, but --dp-size repeats ranks: configure agents instead")
    gpus = [] if device == "cpu" else visible(all_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if device == "cuda":
            raise DeviceUnavailable("--device cuda, but nvidia-smi shows no GPU that this launch may use")
        return "host", tuple(RankConfig(rank) for rank in here)
    first, step = given.number("base_gpu_id", 0) or 0, given.number("gpu_id_step", 1) or 1
    chosen = []
    for i, rank in enumerate(here):
        index = first + i * step
        if not 0 <= index < len(gpus):
            raise DeviceUnavailable(f"rank {rank} would be on GPU {index}, but there are {len(gpus)}")
        chosen.append(RankConfig(rank, gpus[index]))
    return "cuda", tuple(chosen)


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
