"""One deployment over all its hosts: which ranks there are, on which node and GPU each lives, and who loads together.

Nothing is asked of a machine here: the same values give the same answers on every node, so that one configuration file
serves all of them. The arithmetic is SGLang's own (sglang/srt/entrypoints/engine.py, data_parallel_controller.py).
"""

from __future__ import annotations

from dataclasses import dataclass

PORT = 29600


class LayoutError(ValueError):
    """``key`` of a deployment makes no layout; ``text`` says why."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.text = text


@dataclass(frozen=True, slots=True)
class Deployment:
    """Sizes of one model's parallel layout and the hosts that it spans.

    A *replica* is ``tp_size * pp_size`` ranks that serve one copy of the model; with ``attention_dp`` the ``dp_size``
    is a division within a replica, otherwise the number of replicas. Rank numbers count through all replicas:
    replica * tp_size * pp_size + pp_rank * tp_size + tp_rank. ``nodes`` are host names or addresses in the order of
    their node rank, empty for this host alone. The loaders of all nodes meet at ``port`` of the first one, and their
    processes at the port after it. ``meet_seconds`` is how long nodes wait for each other. ``follow``: a node whose
    agents load nothing looks whether another one waits for it, and takes part then.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    attention_dp: bool = False
    nodes: tuple[str, ...] = ()
    port: int = PORT
    meet_seconds: float = 600.0
    follow: bool = True
    base_gpu_id: int = 0
    gpu_id_step: int = 1

    def check(self) -> None:
        """Raise LayoutError for sizes that SGLang could not launch, or that weightcache could not hold."""
        for key in ("tp_size", "pp_size", "dp_size", "ep_size", "gpu_id_step"):
            if getattr(self, key) < 1:
                raise LayoutError(key, f"must be at least 1, got {getattr(self, key)}")
        if self.base_gpu_id < 0:
            raise LayoutError("base_gpu_id", f"must be at least 0, got {self.base_gpu_id}")
        if self.tp_size % self.ep_size:
            raise LayoutError("ep_size", f"{self.ep_size} expert groups do not divide tp_size = {self.tp_size}")
        if self.attention_dp and self.tp_size % self.dp_size:
            raise LayoutError("dp_size", f"{self.dp_size} attention groups do not divide tp_size = {self.tp_size}")
        self._check_nodes()
        if self.meet_seconds <= 0:
            raise LayoutError("meet_seconds", f"must be greater than 0, got {self.meet_seconds:g}")
        if not 1 <= self.port <= 65534:
            raise LayoutError("port", f"expected 1 to 65534 (the port after it is used, too), got {self.port}")
        if self.gpu_id_step > 1 and self._stages_here > 1:
            # SGLang multiplies the step within a stage only, so that stages would share GPUs.
            raise LayoutError("gpu_id_step", f"must be 1 where a host has {self._stages_here} pipeline stages")

    def _check_nodes(self) -> None:
        count = self.node_count
        if len(set(self.nodes)) != len(self.nodes):
            raise LayoutError("nodes", "a node is named twice")
        if any(not node or not node.isprintable() or " " in node for node in self.nodes):
            raise LayoutError("nodes", "a node's name is empty or no host name")
        if count > 1 and self.replicas > 1:
            raise LayoutError("dp_size", "replicas on several nodes are several deployments, one for each node")
        if self.pp_size % count and count % self.pp_size:
            raise LayoutError("nodes", f"{count} nodes and pp_size = {self.pp_size}: one must divide the other")
        if self.tp_size % self._nodes_per_stage:
            raise LayoutError(
                "nodes", f"{self._nodes_per_stage} nodes for each pipeline stage do not divide tp_size = {self.tp_size}"
            )

    @property
    def node_count(self) -> int:
        """How many hosts there are."""
        return max(len(self.nodes), 1)

    @property
    def replicas(self) -> int:
        """How many copies of the model are held."""
        return 1 if self.attention_dp else self.dp_size

    @property
    def world(self) -> int:
        """How many ranks load one copy together."""
        return self.tp_size * self.pp_size

    @property
    def ranks(self) -> range:
        """All ranks of all replicas and nodes."""
        return range(self.world * self.replicas)

    @property
    def _nodes_per_stage(self) -> int:
        return max(self.node_count // self.pp_size, 1)

    @property
    def _stages_here(self) -> int:
        return max(self.pp_size // self.node_count, 1)

    def of_node(self, node: int) -> range:
        """The ranks of one host: all replicas on a single host, a block of the only replica on one of several."""
        size = len(self.ranks) // self.node_count
        return range(node * size, (node + 1) * size)

    def node_of(self, rank: int) -> int:
        """The node that a rank lives on."""
        return rank * self.node_count // len(self.ranks)

    def replica_of(self, rank: int) -> int:
        """The copy of the model that a rank belongs to."""
        return rank // self.world

    def in_replica(self, rank: int) -> int:
        """The rank's number within its replica, which is SGLang's: pp_rank * tp_size + tp_rank."""
        return rank % self.world

    def launch_of(self, rank: int) -> range:
        """The ranks that are loaded by the same launch on the same host; the first one leads."""
        replica, node = self.replica_of(rank), self.of_node(self.node_of(rank))
        return range(max(node.start, replica * self.world), min(node.stop, (replica + 1) * self.world))

    def gpu_index(self, rank: int) -> int:
        """The ordinal of the rank's GPU on its host, in the order of the PCI bus."""
        tp_here = self.tp_size // self._nodes_per_stage
        pp_rank, tp_rank = divmod(self.in_replica(rank), self.tp_size)
        before = self.replica_of(rank) * self.world * self.gpu_id_step
        return (
            self.base_gpu_id + before + (pp_rank % self._stages_here) * tp_here + (tp_rank % tp_here) * self.gpu_id_step
        )

    def arguments(self, node: int) -> tuple[str, ...]:
        """SGLang's arguments for the launch that loads on ``node``. GPUs and rendezvous are the loader's business."""
        sizes = {"--tp-size": self.tp_size, "--pp-size": self.pp_size, "--ep-size": self.ep_size}
        result = [text for name, size in sizes.items() if size > 1 for text in (name, str(size))]
        if self.attention_dp:
            result += ["--dp-size", str(self.dp_size), "--enable-dp-attention"]
        if self.node_count > 1:
            result += ["--nnodes", str(self.node_count), "--node-rank", str(node)]
        return tuple(result)
