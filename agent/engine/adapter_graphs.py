"""SGLang's names around the capture of prefill graphs, for 0.5.17 and 0.5.23; the rest of them is in adapter.py."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightcache.engine import adapter

CAPTURE_PREFILL = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph"
PREFILL_RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
PREFILL_CAPTURE = f"{PREFILL_RUNNER}.capture"
DECODE_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
DECODE_CAPTURE = f"{DECODE_RUNNER}.capture"
ON_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"

BACKEND = "breakable"
"""The only back end of prefill graphs that captures one size independently of the others."""

_AT_ONCE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    # (argument, values with which the capture may wait, what the others are)
    ("speculative_algorithm", (None,), "speculative decoding"),
    ("enable_lora", (None, False), "LoRA adapters"),
    ("enable_dp_attention", (None, False), "data-parallel attention"),
    ("pp_size", (None, 1), "pipeline parallelism"),
    ("attn_cp_size", (None, 1), "context parallelism"),
    ("moe_a2a_backend", (None, "none"), "an all-to-all back end for experts"),
    ("disaggregation_mode", (None, "null"), "disaggregated prefill"),
    ("forward_hooks", (None, [], ()), "forward hooks, which must not be captured"),
    ("enable_symm_mem", (None, False), "symmetric memory"),
    ("enable_memory_saver", (None, False), "the memory saver"),
    ("enable_pdmux", (None, False), "prefill and decode on parts of the device"),
    ("enable_two_batch_overlap", (None, False), "overlapped batches"),
)
_DECODE_AT_ONCE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("enable_torch_compile", (None, False), "torch.compile"),
    ("enable_profile_cuda_graph", (None, False), "a profile of the captures"),
    ("disable_cuda_graph_padding", (None, False), "batches that are not padded"),
)
DECODE_BACKEND = "full"
_SWITCHES = ("SGLANG_ENABLE_CUDA_GRAPH_DEDUP", "SGLANG_ENABLE_GRAPH_POOL_BORROW", "SGLANG_ENABLE_GRAPH_POOL_PRECARVE")
"""They look at all graphs of one capture together."""


def captures_prefill(model_runner: Any) -> bool:
    """Whether this runner is going to capture prefill graphs of the kind whose capture can wait."""
    config = adapter.resolved(model_runner.server_args, "cuda_graph_config")
    prefill = getattr(config, "prefill", None)
    return (
        getattr(prefill, "backend", None) == BACKEND
        and model_runner.device == "cuda"
        and not model_runner.is_draft_worker
    )


def captures_decode(runner: Any) -> bool:
    """Whether this runner captures decode graphs of the kind whose capture can wait."""
    model_runner = runner.model_runner
    config = adapter.resolved(model_runner.server_args, "cuda_graph_config")
    decode = getattr(config, "decode", None)
    return (
        getattr(decode, "backend", None) == DECODE_BACKEND
        and model_runner.device == "cuda"
        and not model_runner.is_draft_worker
    )


def why_at_once(model_runner: Any) -> str:
    """What forbids to capture graphs in a serving engine, or an empty text."""
    for name, harmless, what in _AT_ONCE:
        if adapter.resolved(model_runner.server_args, name) not in harmless:
            return what
    for name in _SWITCHES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "y"):
            return name
    if getattr(getattr(model_runner, "token_to_kv_pool", None), "post_capture_active", False):
        return "a KV pool that takes what the graphs leave"
    # A dummy batch would run on the states of real requests, whose slots it names by small numbers.
    if getattr(getattr(model_runner, "req_to_token_pool", None), "mamba_pool", None) is not None:
        return "layers that keep a state for each request"
    return ""


def why_prefill_at_once(model_runner: Any) -> str:
    """The same, for prefill graphs alone."""
    sizes = adapter.resolved(model_runner.server_args, "cuda_graph_config").prefill.bs or ()
    if max(sizes, default=0) > model_runner.model_config.context_len:
        return "a context that is shorter than the largest graph"
    return ""


def why_decode_at_once(runner: Any) -> str:
    """The same, for decode graphs alone."""
    for name, harmless, what in _DECODE_AT_ONCE:
        if adapter.resolved(runner.model_runner.server_args, name) not in harmless:
            return what
    return "batches that are not padded" if runner.disable_padding else ""


def no_graphs() -> Any:
    """What capture_prefill_graph answers where there are none: prefill runs eagerly."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    # Not an EagerRunner, which stands for "disabled by the configuration".
    return GraphCapture(runner=None, memory_phase="prefill", memory_usage_gb=0, capture_time=0)


def is_prefill_runner(runner: Any) -> bool:
    """Whether ``runner`` replays prefill graphs (not one that runs eagerly, and not None)."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    return isinstance(runner, PrefillCudaGraphRunner)


def account(model_runner: Any, phase: str, gigabytes: float, seconds: float) -> None:
    """Note what a capture of graphs took besides, where /server_info and the log look for it."""
    for name, value in (("graph_memory_usage", gigabytes), ("graph_time_usage", seconds)):
        known = getattr(model_runner, name)
        setattr(model_runner, name, {**known, phase: known.get(phase, 0.0) + value})


def new_stream(prefill: Any) -> Any:
    """A stream for all captures: torch gives memory of a graph pool again only to the stream that it was taken on."""
    return prefill.device_module.Stream()


@contextmanager
def only(prefill: Any, sizes: Sequence[int], stream: Any, output: Any) -> Iterator[None]:
    """Inside the block ``prefill.capture()`` captures these sizes only (numbers of tokens), without a bar.

    ``stream`` is where 0.5.17 captures, which takes another one for each call; ``output`` the buffer that earlier
    captures wrote to, or None for the first one: SGLang would make another one for each call.
    """
    kept = prefill.capture_num_tokens
    prefill.capture_num_tokens = list(sizes)
    if output is not None:
        prefill.backend._alloc_full_buffer = lambda *_: output
    try:
        with _beside_requests(prefill, stream):
            yield
    finally:
        prefill.capture_num_tokens = kept
        if output is not None:
            del prefill.backend._alloc_full_buffer


@contextmanager
def only_decode(decode: Any, sizes: Sequence[int], stream: Any) -> Iterator[None]:
    """Inside the block ``decode.capture()`` captures these sizes only (numbers of requests), without a bar."""
    kept = decode.capture_bs
    decode.capture_bs = list(sizes)
    try:
        with _beside_requests(decode, stream):
            yield
    finally:
        decode.capture_bs = kept


@contextmanager
def _beside_requests(runner: Any, stream: Any) -> Iterator[None]:
    """A capture between two requests. When the block has been left, the device has done it all: what serves does not
    wait for this stream.
    """
    module: Any = sys.modules[type(runner).__module__]
    kept = module.tqdm, module.freeze_gc, module.graph_capture
    # They may be shared with what serves, and hold a batch's positions: a capture would write its keys there.
    runner.buffers.reset_index_buffers()
    module.tqdm = _Quiet
    begin = module.graph_capture
    module.graph_capture = lambda stream=stream: begin(stream=stream)
    # A full collection before and after each size would take longer than its capture.
    module.freeze_gc = lambda _: contextlib.nullcontext()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        module.tqdm, module.freeze_gc, module.graph_capture = kept
        runner.device_module.synchronize()


class _Quiet:
    """The part of the module tqdm that is used there, without a bar."""

    class tqdm:  # noqa: N801 - its name there
        def __init__(self, sizes: Sequence[int]) -> None:
            self._sizes = sizes

        def __iter__(self) -> Iterator[int]:
            return iter(self._sizes)

        def set_description(self, text: str) -> None:
            """Nobody looks."""


def output_of(prefill: Any) -> Any:
    """The buffer that the last capture wrote to."""
    return prefill.backend._shared_output_buffer


def is_idle(scheduler: Any) -> bool:
    """Whether nothing runs or waits on this rank."""
    return bool(scheduler.is_fully_idle())


def batches(scheduler: Any) -> int:
    """How many batches this rank has run."""
    return int(scheduler.forward_ct)


@contextmanager
def awake(scheduler: Any) -> Iterator[None]:
    """Inside the block an idle scheduler does not wait for a request."""
    sleeper, scheduler.idle_sleeper = scheduler.idle_sleeper, None
    try:
        yield
    finally:
        scheduler.idle_sleeper = sleeper


def all_ranks(agreed: bool) -> bool:
    """Whether every rank of the world says so; all of them have to ask at the same step."""
    _, size, group = adapter.world()
    if size == 1:
        return agreed
    votes = torch.tensor([int(agreed)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group)
    return bool(votes.item())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that torch got no memory, and not that the device failed."""
    return isinstance(error, torch.OutOfMemoryError)


def is_alone() -> bool:
    """Whether this rank has no others to wait for."""
    return bool(adapter.world()[1] == 1)


def free_bytes(model_runner: Any) -> int:
    """Device memory that nobody holds, after torch's cache was emptied."""
    with torch.cuda.device(model_runner.gpu_id):
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
