"""SGLang's names that parked processes lean on, for 0.5.17 and 0.5.23 (see adapter.py). Standard library only."""

from __future__ import annotations

import importlib.metadata

SERVER_MODULE = "sglang.launch_server"
"""What runs as ``__main__``; never imported under its own name, which would make runpy(3) complain."""
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
PRELAUNCHED = "run_scheduler_process_with_init_pipe"
"""0.5.23, attention with data parallel ranks: a scheduler whose real function is the first argument."""

IMPORTS = {
    "main": ("sglang.srt.plugins", "sglang.srt.server_args", HTTP_SERVER),
    "scheduler": ("sglang.srt.plugins", "sglang.srt.server_args", SCHEDULER, "sglang.srt.models.registry"),
    "detokenizer": ("sglang.srt.plugins", "sglang.srt.server_args", DETOKENIZER),
}
"""What each kind of process has imported when it is parked: what a fresh one imports before it serves."""
KINDS = {SCHEDULER: "scheduler", DETOKENIZER: "detokenizer"}
"""Kinds of processes by the module of the function that they run."""

READ_LATER = {
    "WEIGHTCACHE_DIRECTIVE": "read by the plugin in load_plugins, which a scheduler calls first of all",
    "SGLANG_RUN_ID": "made anew for each launch (_set_envs_and_config); names shared memory of offloading",
    "NCCL_CUMEM_ENABLE": "read by NCCL when a communicator is made",
    "NCCL_NVLS_ENABLE": "the same",
    "NCCL_GRAPH_MIXING_SUPPORT": "the same",
    "NCCL_MNNVL_ENABLE": "the same",
    "NCCL_ALGO": "the same",
    "CUDA_DEVICE_MAX_CONNECTIONS": "read by the driver when a context is made",
    "TOKENIZERS_PARALLELISM": "read by tokenizers at each parallel loop",
    "PROMETHEUS_MULTIPROC_DIR": "made anew for each launch with metrics; read when prometheus_client is imported, "
    "which SGLang's modules put off until then",
    "SGLANG_GRPC_ENDPOINT": "where the main process listens; read when a client is made",
}
"""Variables that SGLang sets before it starts its children, and why a child that is imported already may get them.

What is not named here has to be as it was when the child was parked (weightcache.warm.learned).
"""


def kind(target: object, arguments: tuple[object, ...]) -> str:
    """Which kind of process runs ``target``; empty for one that is never parked."""
    if getattr(target, "__name__", "") == PRELAUNCHED and arguments:
        target = arguments[0]
    return KINDS.get(str(getattr(target, "__module__", "")), "")


def starts_schedulers(dp_size: int, attention_dp: bool) -> bool:
    """Whether the main process itself starts them: a controller of data parallel ranks starts its own."""
    if dp_size <= 1:
        return True
    return attention_dp and importlib.metadata.version("sglang") != "0.5.17"
