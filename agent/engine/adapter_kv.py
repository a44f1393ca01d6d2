"""SGLang's names around its KV pool, for 0.5.17 and 0.5.23; the rest of them is in adapter.py.

SGLang can reserve the addresses of a KV pool, capture graphs on one page of it, and back the rest when it knows how
much memory the graphs have left (srt/mem_cache/kv_vmm_backing.py; off by default). Its carrier is used here, not its
sizing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from weightcache.engine import adapter

PROFILE_BYTES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
IS_BACKED_LATER = "sglang.srt.model_executor.model_runner_components.kv_pool_runtime.is_post_capture_kv_active"
SHARE_WITH_STATES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache"
"""Called by PROFILE_BYTES for models whose layers keep states: what of the memory is left for keys and values."""
MAKE_LATENT = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers"
MAKE_STATES = "sglang.srt.mem_cache.memory_pool.MambaPool.__init__"
BACK_NOW = "sglang.srt.model_executor.model_runner.ModelRunner.post_capture_resize_kv_pool"
MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
OWNER = "KvVmmBufferOwner"
"""The name in MEMORY_POOL by which pools make what holds their buffers."""

_FP8 = ("fp8_e4m3", "fp8_e5m2")
POOLS = frozenset(("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool", "HybridLinearKVPool"))
"""Classes whose memory comes and goes, when they are made in the ways above."""

_BACKENDS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend"
)  # fmt: skip

UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    # (argument, values that are supported, what the others are)
    ("speculative_algorithm", (None, "EAGLE", "EAGLE3", "STANDALONE"), "this kind of speculative decoding"),
    ("kv_cache_dtype", (None, "auto", "bf16", "bfloat16", "float16", *_FP8), "this quantized KV cache"),
    ("kv_canary", (None, "none"), "canaries in KV memory"),
    ("enable_int8_mamba_checkpoint", (None, False), "a second pool of states"),
    ("enable_page_major_kv_layout", (None, False), "a KV cache that is ordered by pages"),
    ("enable_memory_saver", (None, False), "the memory saver"),
    ("enable_hierarchical_cache", (None, False), "the hierarchical cache"),
    ("enable_lmcache", (None, False), "LMCache"),
    ("enable_flexkv", (None, False), "FlexKV"),
    ("enable_unified_cache_external_linker", (None, False), "a KV cache that others link to"),
    ("enable_hisparse", (None, False), "hierarchical sparse attention"),
    ("enable_unified_memory", (None, False), "KV memory that is one with the memory of other states"),
    ("enable_kv_cache_sharding", (None, False), "a KV cache that is cut by pages"),
    ("disaggregation_mode", (None, "null"), "disaggregated prefill"),
    ("prefill_only_disable_kv_cache", (None, False), "an engine without KV memory"),
    ("enable_pdmux", (None, False), "prefill and decode on parts of the device"),
    ("dcp_size", (None, 1), "a KV cache that is cut by context"),
    ("pp_size", (None, 1), "pipeline parallelism"),
)


def why_not(model_runner: Any) -> str:
    """Why the KV memory of this engine cannot be given back and taken again, or an empty text."""
    for name, supported, what in UNSUPPORTED:
        if adapter.resolved(model_runner.server_args, name) not in supported:
            return what
    if family := _other_family(model_runner.model_config.hf_config):
        return family
    if model_runner.is_hybrid_swa_compress:
        return "layers with a sliding window over other heads"
    if _casts_all(model_runner):
        return f"latent attention (MLA) over another type of values ({model_runner.kv_cache_dtype}) by these kernels"
    if os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL"):
        return "a memory pool of its own"
    return _why_no_draft(model_runner)


def _casts_all(model_runner: Any) -> bool:
    """Whether kernels may convert the whole pool of latent attention before they read some of it, memory or not."""
    args = model_runner.server_args
    backends = {adapter.resolved(args, name) for name in _BACKENDS} - {None}
    return model_runner.use_mla_backend and model_runner.kv_cache_dtype != model_runner.dtype and backends != {"triton"}


def _why_no_draft(model_runner: Any) -> str:
    args = model_runner.server_args
    if not adapter.resolved(args, "speculative_algorithm"):
        return ""
    if has_states(model_runner.model_config):
        return "speculative decoding by a model that keeps a state for each request"
    if (
        int(adapter.resolved(args, "speculative_eagle_topk") or 1) > 1
        and int(adapter.resolved(args, "page_size") or 1) > 1
    ):
        return "a draft that guesses a tree, with pages of several tokens"
    return ""


def _other_family(config: Any) -> str:
    from sglang.srt.configs import model_config

    if model_config.is_deepseek_dsa(config):
        return "sparse attention that keeps an index (DSA)"
    if model_config.is_deepseek_v4(config) or model_config.is_minimax_sparse(config):
        return "compressed or sparse KV memory"
    return ""


def unproven(model_runner: Any) -> str:
    """What no run on a GPU has shown to come back as it was, of what ``why_not`` lets pass; or an empty text."""
    if adapter.resolved(model_runner.server_args, "speculative_algorithm"):
        return "speculative decoding"
    if model_runner.kv_cache_dtype.itemsize < 2:  # what "auto" came to, as with a checkpoint that says FP8
        return f"a quantized KV cache ({model_runner.kv_cache_dtype})"
    if model_runner.use_mla_backend:
        return "latent attention (MLA)"
    if model_runner.is_hybrid_swa:
        return "layers with a sliding window"
    if has_states(model_runner.model_config):
        return "layers that keep a state for each request"
    return ""


def strange_pools(model_runner: Any) -> str:
    """The class of a pool of this engine that is none of POOLS, or an empty text."""
    pool = model_runner.token_to_kv_pool
    parts = [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    names = [type(part).__name__ for part in (pool, *parts) if part is not None]
    return next((name for name in names if name not in POOLS), "")


def tokens(model_runner: Any) -> int:
    """How many tokens its pool has."""
    return int(model_runner.max_total_num_tokens)


def runners(scheduler: Any) -> Iterator[Any]:
    """The model runners of this rank: the target's, then those of a draft that ``why_not`` of the target lets pass."""
    yield scheduler.tp_worker.model_runner
    if scheduler.draft_worker is not None:
        yield from scheduler.draft_worker.draft_worker.draft_runners


def shares_with_states(configurator: Any) -> bool:
    """Whether PROFILE_BYTES gives a part of the memory to states."""
    return configurator.mambaish_config is not None


def has_states(model_config: Any) -> bool:
    """Whether some layers keep a state for each request in place of keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def replace_owner(owner: type) -> None:
    """Have pools make ``owner`` where they would make SGLang's own."""
    module = sys.modules[MEMORY_POOL]
    getattr(module, OWNER)  # a release that makes its buffers in another way does not go on without a word
    setattr(module, OWNER, owner)


def back_as_planned(model_runner: Any) -> None:
    """What follows the capture of graphs: the pool gets exactly the tokens that it was made for."""
    model_runner.token_to_kv_pool.finalize_backing(model_runner.memory_pool_config)


def plan_key(configurator: Any) -> tuple[str, ...]:
    """What the bytes depend on that a plan is made for, besides the engine's file and the free memory."""
    device = torch.cuda.get_device_properties(configurator.gpu_id)
    versions = f"sglang={adapter.version()}", f"torch={torch.__version__}"
    return (*versions, f"device={device.name}, {device.total_memory} bytes")


def from_first_rank(value: int) -> int:
    """The ``value`` of the world's first rank, on all ranks; all of them have to ask."""
    _, size, group = adapter.world()
    if size == 1:
        return value
    sent = torch.tensor([value], dtype=torch.int64)
    torch.distributed.broadcast(sent, torch.distributed.get_global_rank(group, 0), group=group)
    return int(sent.item())
