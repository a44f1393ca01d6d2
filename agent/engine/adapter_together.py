"""Where SGLang's ranks talk to each other, so that a rank can load alone while the others wait for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"

METHODS = (
    "all_reduce", "quant_all_reduce", "fused_allreduce_rmsnorm", "fused_allreduce_rmsnorm_quant_per_group",
    "reduce_scatter_along_dim", "reduce_scatter_tensor", "all_to_all_single", "reduce_scatter", "reduce_scatterv",
    "all_gather_into_tensor", "all_gather", "all_gatherv", "gather", "broadcast", "broadcast_object",
    "broadcast_object_list", "all_gather_object", "send_object", "recv_object", "broadcast_tensor_dict",
    "send_tensor_dict", "recv_tensor_dict", "send_recv_tensor_dict", "barrier", "send", "recv",
)  # fmt: skip
"""Of COORDINATOR: each waits for other ranks, or makes them wait. 0.5.17 lacks one, send_recv_tensor_dict."""

HARMLESS = ("graph_capture", "destroy")
"""Its other public methods."""

FUNCTIONS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip
"""The same of torch.distributed."""


class NeedsOthers(Exception):
    """What runs here waits for other ranks."""


def neighbours() -> tuple[bool, ...]:
    """Which ranks of this one's tensor-parallel group share its first rank's host; all of them have to ask together.

    SGLang asks while it constructs a model, where there are several hosts, and only then. Empty on a single one.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel

    if int(get_parallel().nnodes) == 1:
        return ()
    return tuple(parallel_state.in_the_same_node_as(parallel_state.get_tp_group().cpu_group, source_rank=0))


@contextmanager
def alone(known: Sequence[bool] = ()) -> Iterator[None]:
    """Whatever waits for other ranks inside the block raises NeedsOthers instead; ``known`` are its ``neighbours``.

    What is not seen here waits until the load's limit ends it, or gives other bytes than all ranks together, which
    whoever compares contents notices.
    """
    from sglang.srt.distributed import parallel_state

    with ExitStack() as stack:
        answer = functools.partial(_same_node, tuple(known))
        stack.enter_context(mock.patch.object(parallel_state, "in_the_same_node_as", answer))
        for name in METHODS:
            if (method := getattr(parallel_state.GroupCoordinator, name, None)) is not None:
                replaced = _refused(name, method, lambda arguments: int(arguments[0].world_size))
                stack.enter_context(mock.patch.object(parallel_state.GroupCoordinator, name, replaced))
        for name in FUNCTIONS:
            if (function := getattr(torch.distributed, name, None)) is not None:
                stack.enter_context(mock.patch.object(torch.distributed, name, _refused(name, function, _size)))
        yield


def _same_node(known: tuple[bool, ...], group: Any, source_rank: int = 0) -> list[bool]:
    if not known or source_rank != 0 or torch.distributed.get_world_size(group) != len(known):
        raise NeedsOthers("loading needs the other ranks (in_the_same_node_as)")
    return list(known)


def _refused(name: str, original: Callable[..., Any], size: Callable[[tuple[Any, ...]], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refused(*arguments: Any, **keywords: Any) -> Any:
        if size((*arguments, *keywords.values())) > 1:
            raise NeedsOthers(f"loading needs the other ranks ({name})")
        return original(*arguments, **keywords)

    return refused


def _size(arguments: tuple[Any, ...]) -> int:
    """How many ranks the group among a function's arguments has; the default one where none is given."""
    group = next((value for value in arguments if isinstance(value, torch.distributed.ProcessGroup)), None)
    return int(torch.distributed.get_world_size(group))
