"""Every SGLang name that weightcache leans on, for 0.5.17 and 0.5.23, in one place.

tests/engine checks the names and their parameters against both versions (a contract test), so that a new release fails
there, loudly, and not in production. SGLang is imported inside the functions: the launcher imports the package too.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

SUPPORTED = ("0.5.17", "0.5.23")

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
GET_MODEL_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
INIT_MEMORY_POOLS = "sglang.srt.managers.scheduler.Scheduler.init_memory_pools"
RUN_EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ENABLE_OWN_CACHE = "sglang.srt.model_executor.model_runner_components.load_model_utils.maybe_enable_ipc_weight_cache"
LOAD_PLUGINS = "sglang.srt.plugins.load_plugins"
TOKENIZER_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"

SUPPORTED_LOADERS = ("DefaultModelLoader", "ModelOptModelLoader")
"""Loaders that construct a model exactly as build_on_meta does.

ModelOptModelLoader is the default one for checkpoints that ModelOpt has quantized. What it quantizes by itself is a
model of transformers', which nobody can publish: no construction is seen (after_construction).
"""

BACKEND_ARGUMENTS = (
    "moe_runner_backend", "moe_a2a_backend", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend",
    "flashinfer_mxfp4_moe_precision", "disable_shared_experts_fusion", "enforce_shared_experts_fusion",
    "mamba_backend", "linear_attn_backend", "model_impl", "enable_dp_lm_head", "moe_dense_tp_size",
    "rl_on_policy_target", "model_loader_extra_config", "init_expert_location", "ep_num_redundant_experts",
    "ep_dispatch_algorithm", "enable_multimodal", "language_only", "kt_method",
)  # fmt: skip

# Options whose code writes into weights while the engine runs, or re-homes them, or needs memory that torch allocated.
REFUSED_ARGUMENTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("cpu_offload_gb", lambda v: bool(v), "offloading moves weights to the host while the model is built"),
    ("offload_group_size", lambda v: bool(v) and v > 0, "layer offloading moves weights while the model is built"),
    ("enable_eplb", bool, "expert rebalancing writes into the weights"),
    ("elastic_ep_backend", lambda v: v not in (None, "none"), "elastic expert parallelism re-homes weights"),
    ("enable_elastic_expert_backup", bool, "the expert backup copies weights through its own memory"),
    ("dwdp_size", lambda v: bool(v) and v > 1, "DWDP re-homes weights"),
    ("torchao_config", bool, "torchao replaces the weights after loading"),
    ("modelopt_quant", bool, "ModelOpt quantizes a model of transformers' instead of loading one of SGLang's"),
    ("startup_weight_load_mode", lambda v: v == "overlap", "overlapped start-up bypasses the model loader"),
    ("remote_instance_weight_loader_start_seed_via_transfer_engine", bool, "RDMA seeding needs memory of torch's own"),
)


def version() -> str:
    """SGLang's version, such as 0.5.23."""
    return importlib.metadata.version("sglang")


def resolved(server_args: Any, name: str) -> Any:
    """The value of a server argument after SGLang's own resolution, or None where this version has no such argument.

    0.5.23 keeps the record raw and answers through a view; 0.5.17 resolves in place.
    """
    model_override = sys.modules.get("sglang.srt.arg_groups.model_override_base")
    view = model_override.resolving_view(server_args) if model_override is not None else server_args
    return getattr(view, name, None)


def refused(server_args: Any) -> str:
    """The name and reason of the first option that weightcache cannot serve with, or an empty text."""
    for name, is_set, reason in REFUSED_ARGUMENTS:
        if is_set(resolved(server_args, name)):
            return f"--{name.replace('_', '-')}: {reason}"
    return ""


def parallel() -> Any:
    """SGLang's parallel topology: tp_size, tp_rank, pp_size, pp_rank, moe_ep_size, attn_cp_size and so on."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def world() -> tuple[int, int, Any]:
    """(rank, size, CPU group) of the world that loads one model together."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return group.rank_in_group, group.world_size, group.cpu_group


def global_rank() -> int:
    """pp_rank * tp_size + tp_rank."""
    topology = parallel()
    return int(topology.pp_rank * topology.tp_size + topology.tp_rank)


def build_on_meta(model_config: Any, load_config: Any) -> nn.Module:
    """Construct the model as the default loader would, without memory for its tensors."""
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    quantization = _get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        model: nn.Module = _initialize_model(model_config, load_config, quantization)
    return model


@contextmanager
def apart() -> Iterator[None]:
    """Models that are constructed inside the block share no module with those of before.

    SGLang makes a rotary embedding once for equal parameters: a second model would get that of the first.
    """
    from sglang.srt.layers.rotary_embedding import factory

    kept = dict(factory._ROPE_DICT)
    factory._ROPE_DICT.clear()
    try:
        yield
    finally:
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(kept)


@contextmanager
def after_construction(callback: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``callback`` with every model that a loader constructs inside the block, before it loads any weight."""
    from sglang.srt.model_loader import loader

    original = loader._initialize_model

    def observed(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = original(*args, **kwargs)
        callback(model)
        return model

    loader._initialize_model = observed
    try:
        yield
    finally:
        loader._initialize_model = original


def count_weights(inner: Any, on_bytes: Callable[[int], None]) -> None:
    """Tell ``on_bytes`` the size of each checkpoint tensor that the loader ``inner`` reads."""
    original = getattr(inner, "_get_all_weights", None)
    if original is None:
        return

    def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for name, tensor in original(*args, **kwargs):
            yield name, tensor
            on_bytes(tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0)

    inner._get_all_weights = counted


def checkpoint_directory(model_config: Any) -> Path | None:
    """Where the checkpoint lies on this host, or None when it is no local directory and not in the hub's cache."""
    path = Path(model_config.model_path)
    if path.is_dir():
        return path.resolve()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(path), revision=model_config.revision, local_files_only=True))
    except Exception:  # noqa: BLE001  the hub client raises its own and others' errors for "not here"
        return None


def add_to_baseline(model_runner: Any, resident_bytes: int) -> None:
    """Tell the KV pool's sizing that ``resident_bytes`` were taken before the baseline was measured.

    The pool gets ``free - baseline * (1 - mem_fraction_static)``: arenas that were resident before this engine started
    are missing from the baseline, and the pool would grow by their share. 0.5.23 reads ``preloaded_weights_bytes`` of
    the loader instead (ModelRunner.account_preloaded_weights).
    """
    if not hasattr(type(model_runner), "account_preloaded_weights"):
        model_runner.pre_model_load_memory += resident_bytes / 2**30
