"""Parallel layouts to be run on GPUs: what SGLang is told, what [deployment] says, and how many loaders that takes.

Both are written by hand: that they mean the same is what the run shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LARGE = "large"
"""In the place of a kind: the checkpoint that $WEIGHTCACHE_MODEL names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout, with ``ranks`` of every model, each on a GPU of its own.

    ``models`` are kinds of tests/models/kinds.py; several are held, and served, at the same time on the same GPUs.
    ``turned``: rank 0 is on the last GPU, by [[rank]] tables for the agents and by CUDA_VISIBLE_DEVICES for engines.
    ``nodes`` are hosts, each with a runtime directory, a configuration and a launcher of its own. ``apart``: as if each
    of them had a machine, which has one GPU; they share this machine's first one, and meet over sockets alone.
    """

    proves: str
    ranks: int
    engine: tuple[str, ...]
    deployment: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("dense",)
    nodes: int = 1
    replicas: int = 1
    turned: bool = False
    apart: bool = False
    on_cpu: bool = False

    @property
    def launches(self) -> int:
        """Loaders of one model, over all nodes."""
        return self.nodes * self.replicas

    @property
    def gpus(self) -> int:
        """GPUs of this machine that it needs."""
        return 1 if self.apart else self.ranks

    def of_node(self, node: int) -> range:
        """The ranks of a node."""
        here = self.ranks // self.nodes
        return range(node * here, (node + 1) * here)

    def gpus_of(self, node: int) -> list[int]:
        """The ordinals of its GPUs on this machine, in the order of its ranks."""
        here = [0] if self.apart else list(self.of_node(node))
        return here[::-1] if self.turned else here

    def replica_of(self, rank: int) -> int:
        """The copy of the model that a rank belongs to."""
        return rank * self.replicas // self.ranks


def _tensor(size: int) -> dict[str, Any]:
    return {"engine": ("--tp-size", str(size)), "deployment": {"tp_size": size}}


def _attention(size: int, experts: int) -> dict[str, Any]:
    """As many attention groups as ranks, so that a kind with few heads can be cut into many."""
    engine = ("--tp-size", str(size), "--dp-size", str(size), "--enable-dp-attention", "--ep-size", str(experts))
    return {
        "engine": engine,
        "deployment": {"tp_size": size, "dp_size": size, "attention_dp": True, "ep_size": experts},
    }


def _stages(tensor: int, stages: int) -> dict[str, Any]:
    return {
        "engine": ("--tp-size", str(tensor), "--pp-size", str(stages)),
        "deployment": {"tp_size": tensor, "pp_size": stages},
    }


def _experts(size: int) -> dict[str, Any]:
    return {
        "engine": ("--tp-size", str(size), "--ep-size", str(size)),
        "deployment": {"tp_size": size, "ep_size": size},
    }


LAYOUTS: dict[str, Layout] = {
    "tp2": Layout("a large model on two GPUs", 2, models=(LARGE,), **_tensor(2)),
    "tp2-small": Layout("tensor parallelism", 2, on_cpu=True, **_tensor(2)),
    "tp2-turned": Layout("ranks and GPUs in opposite order", 2, turned=True, **_tensor(2)),
    "pp2": Layout("pipeline stages", 2, **_stages(1, 2)),
    "dp2": Layout("two copies of the model", 2, engine=("--dp-size", "2"), deployment={"dp_size": 2}, replicas=2),
    "dp2-attention": Layout("attention data parallelism", 2, models=("moe",), **_attention(2, 1)),
    "ep2": Layout("expert parallelism", 2, models=("moe",), **_experts(2)),
    "nodes2": Layout("two hosts", 2, nodes=2, on_cpu=True, **_tensor(2)),
    "hosts2": Layout("a large model on two hosts", 2, models=(LARGE,), nodes=2, apart=True, **_tensor(2)),
    "hosts2-small": Layout("tensor parallelism over two hosts", 2, nodes=2, apart=True, on_cpu=True, **_tensor(2)),
    "hosts2-pp": Layout("a pipeline stage on each host", 2, nodes=2, apart=True, **_stages(1, 2)),
    "hosts2-ep": Layout("experts on two hosts", 2, models=("moe",), nodes=2, apart=True, **_experts(2)),
    "hosts2-dp": Layout("attention groups on two hosts", 2, models=("moe",), nodes=2, apart=True, **_attention(2, 1)),
    "hosts4": Layout("tensor and pipeline parallelism over four hosts", 4, nodes=4, apart=True, **_stages(2, 2)),
    "hosts8": Layout("a large model on eight hosts", 8, models=(LARGE,), nodes=8, apart=True, **_tensor(8)),
    "two-models": Layout("another model on the same GPUs", 2, models=("dense", "tied"), on_cpu=True, **_tensor(2)),
    "tp4": Layout("a large model on four GPUs", 4, models=(LARGE,), **_tensor(4)),
    "tp2pp2": Layout("tensor and pipeline parallelism", 4, **_stages(2, 2)),
    "ep4": Layout("expert parallelism on four GPUs", 4, models=("moe",), **_experts(4)),
    "tp8": Layout("a large model on eight GPUs", 8, models=(LARGE,), **_tensor(8)),
    "tp4pp2": Layout("tensor and pipeline parallelism on eight GPUs", 8, **_stages(4, 2)),
    "ep8": Layout("attention data and expert parallelism", 8, models=("moe",), **_attention(8, 8)),
}


def chosen(names: list[str], gpus: int, backend: str) -> dict[str, str]:
    """Each layout that was asked for (by default those for exactly this machine), and why it is skipped, if it is."""
    if not names:
        names = [name for name, what in LAYOUTS.items() if (what.on_cpu if backend == "host" else what.gpus == gpus)]
    return {name: _obstacle(LAYOUTS[name], gpus, backend) for name in names}


def _obstacle(layout: Layout, gpus: int, backend: str) -> str:
    if backend == "host":
        return "" if layout.on_cpu else "not a layout of SGLang's CPU engine, or not one of this dry run"
    return "" if gpus >= layout.gpus else f"needs {layout.gpus} GPUs, and there are {gpus}"
