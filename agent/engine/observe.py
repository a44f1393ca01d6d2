"""Compute the fingerprint of the running process from live objects, before loading (which changes some of them).

Loader and engine call this function at the same point, so that a field that both compute the same way is equal exactly
when the bytes may be shared.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from typing import Any

import torch

from weightcache import checkpoint
from weightcache.engine import adapter
from weightcache.fingerprint import Fingerprint
from weightcache.manifest import SCHEMA

KERNEL_PACKAGES = (
    "sglang-kernel", "sgl-kernel", "flashinfer-python", "deep-gemm", "sgl-deep-gemm", "triton", "compressed-tensors",
    "transformers", "quack-kernels", "nvidia-cutlass-dsl",
)  # fmt: skip

# Switches that choose kernels or layouts. Too many is safe: a difference costs a disk load, never wrong numbers.
_LAYOUT = re.compile(
    r"^(SGLANG|SGL|FLASHINFER|VLLM|DG|TRTLLM)_.*"
    r"(MOE|FP8|FP4|INT8|W4A|MXFP|GEMM|QUANT|MARLIN|CUTLASS|AITER|SHUFFLE|EXPERT|WEIGHT|LAYOUT|MLA|ROPE|EMBED|HEAD)"
)
_NOT_LAYOUT = re.compile(r"(CACHE_DIR|CACHE_ROOT|LOG|DEBUG|TIMEOUT|NUM_THREADS|WORKSPACE_BASE)")


def role_of(model_config: Any, load_config: Any) -> str:
    """``target``, or ``draft-N`` for the N-th draft model of the engine."""
    if not getattr(model_config, "is_draft_model", False):
        return "target"
    return f"draft-{getattr(load_config, 'draft_model_idx', None) or 0}"


def observe(model_config: Any, load_config: Any, server_args: Any, device: torch.device) -> Fingerprint:
    """The fingerprint of what this process is about to load. Raises CheckpointError for an unreadable checkpoint."""
    topology = adapter.parallel()
    directory = adapter.checkpoint_directory(model_config)
    quantization = getattr(model_config.hf_config, "quantization_config", None)
    return Fingerprint(
        schema=SCHEMA,
        role=role_of(model_config, load_config),
        model_path=str(directory or model_config.model_path),
        model_arch=",".join(getattr(model_config.hf_config, "architectures", None) or ()),
        revision=str(getattr(model_config, "revision", None) or ""),
        checkpoint=checkpoint.identity(directory) if directory else f"unresolved:{model_config.model_path}",
        override_args=_text(adapter.resolved(server_args, "json_model_override_args")),
        load_format=_load_format(load_config),
        tp_size=int(topology.tp_size),
        tp_rank=int(topology.tp_rank),
        pp_size=int(topology.pp_size),
        pp_rank=int(topology.pp_rank),
        dp_size=_attention_groups(server_args),
        ep_size=int(topology.moe_ep_size),
        ep_rank=int(topology.moe_ep_rank),
        attention_dp=int(topology.attn_dp_size),
        attention_cp_size=int(topology.attn_cp_size),
        moe_dp_size=int(topology.moe_dp_size),
        quant_method=str(model_config.quantization or ""),
        quant_config_hash=_hash(quantization) if quantization is not None else "",
        dtype=str(model_config.dtype).removeprefix("torch."),
        device=device.type,
        device_capability=capability(device),
        torch_version=torch.__version__,
        sglang_version=adapter.version(),
        kernel_versions=_kernel_versions(),
        backends=_backends(server_args),
        environment=_environment(),
        plugins=_plugins(),
    )


def _attention_groups(server_args: Any) -> int:
    """The size of data parallelism where it divides the attention weights; replicas hold equal weights."""
    if not adapter.resolved(server_args, "enable_dp_attention"):
        return 1
    return int(adapter.resolved(server_args, "dp_size") or 1)


def _text(value: Any) -> str:
    if value is None or value == "{}":
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _load_format(load_config: Any) -> str:
    value = load_config.load_format
    name = str(getattr(value, "value", value)) if not isinstance(value, type) else value.__qualname__
    # "auto" is resolved by what the checkpoint holds, which its identity covers.
    return "auto" if name in ("auto", "safetensors") else name


def _hash(value: Any) -> str:
    plain = value if isinstance(value, dict) else getattr(value, "to_dict", lambda: vars(value))()
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:32]


def capability(device: torch.device) -> str:
    """The compute capability such as ``9.0``; empty on a CPU."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def _kernel_versions() -> str:
    found = []
    for name in KERNEL_PACKAGES:
        try:
            found.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " ".join(found)


def _backends(server_args: Any) -> str:
    values = ((name, adapter.resolved(server_args, name)) for name in adapter.BACKEND_ARGUMENTS)
    return " ".join(f"{name}={value}" for name, value in values if value not in (None, False, "", {}, "{}", "auto"))


def _environment() -> str:
    names = sorted(name for name in os.environ if _LAYOUT.search(name) and not _NOT_LAYOUT.search(name))
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def _plugins() -> str:
    """Other SGLang plugins that this process loads, with the versions of their distributions."""
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    rows = [
        f"{entry.name}={entry.dist.version if entry.dist else '?'}"
        for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if entry.name != "weightcache" and (not allowed or entry.name in allowed)
    ]
    if platform := os.environ.get("SGLANG_PLATFORM"):
        rows.append(f"platform={platform}")
    return " ".join(sorted(rows))
