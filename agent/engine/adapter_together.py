"""Where SGLang's ranks talk to each other, so that a rank can load alone while the others wait for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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


@contextmanager
def alone() -> Iterator[None]:
    """Whatever waits for other ranks inside the block raises NeedsOthers instead.

    What is not seen here waits until the load's limit ends it, or gives other bytes than all ranks together, which
    whoever compares contents notices.
    """
    from sglang.srt.distributed import parallel_state

    with ExitStack() as stack:
        for name in METHODS:
            if (method := getattr(parallel_state.GroupCoordinator, name, None)) is not None:
                replaced = _refused(name, method, lambda arguments: int(arguments[0].world_size))
                stack.enter_context(mock.patch.object(parallel_state.GroupCoordinator, name, replaced))
        for name in FUNCTIONS:
            if (function := getattr(torch.distributed, name, None)) is not None:
                stack.enter_context(mock.patch.object(torch.distributed, name, _refused(name, function, _size)))
        yield


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
