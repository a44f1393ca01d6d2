"""SGLang's functions that are phases of a start, for 0.5.17 and 0.5.23; the rest of its names is in adapter.py.

Each is a dotted name and the phase that its calls are. Only what a process has imported is looked at, and what a
release does not have is left out: tests/engine/contract.py says which release has which.
"""

from __future__ import annotations

from typing import Any

from weightcache.engine import adapter

_ENGINE = "sglang.srt.entrypoints.engine"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.runner"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager"

ARGUMENTS = {
    "sglang.srt.server_args.prepare_server_args": "arguments",
    "sglang.srt.server_args.ServerArgs.resolve_once": "arguments",
}
MAIN = {
    f"{_ENGINE}.Engine._launch_scheduler_processes": "spawn",
    f"{_ENGINE}.Engine._launch_detokenizer_subprocesses": "spawn",
    f"{_ENGINE}._wait_for_scheduler_ready": "waiting",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__": "tokenizer",
    "sglang.srt.parser.template_manager.TemplateManager.initialize_templates": "tokenizer",
}
SCHEDULER = {
    f"{_SCHEDULER}.__init__": "scheduler",
    "sglang.srt.distributed.bootstrap.init_torch_distributed": "distributed",
    "sglang.srt.distributed.bootstrap.init_parallel_runtime": "distributed",
    f"{_SCHEDULER}.init_model_config": "model config",
    f"{_SCHEDULER}.init_tokenizer": "tokenizer",
    f"{_SCHEDULER}.init_tp_model_worker": "model worker",
    "sglang.srt.utils.hf_transformers_utils.get_tokenizer": "tokenizer",  # the model worker's own, imported later
    adapter.LOAD_MODEL: "weights",
    adapter.INIT_MEMORY_POOLS: "kv",
    f"{_SCHEDULER}.init_all_attention_backends": "attention",
    f"{_SCHEDULER}.init_all_cuda_graphs": "graphs",
    f"{_SCHEDULER}.init_disaggregation": "disaggregation",
}
GRAPHS = {
    f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape": "decode graph",
    f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture_one_shape": "prefill graph",
    "sglang.srt.model_executor.cpu_graph_runner.CPUGraphRunner.capture_one_batch_size": "decode graph",
}
"""One call a graph, with its size as the first argument after self."""
CONTROLLER = {f"{_CONTROLLER}.DataParallelController.__init__": "controller"}
DETOKENIZER = {f"{_DETOKENIZER}.DetokenizerManager.__init__": "detokenizer"}

READY = {
    adapter.RUN_EVENT_LOOP: "ready",
    f"{_CONTROLLER}.DataParallelController.event_loop": "ready",
    f"{_DETOKENIZER}.DetokenizerManager.event_loop": "ready",
    f"{_DETOKENIZER}.DetokenizerManager.multi_http_worker_event_loop": "ready",
}
"""Functions whose call is a moment: this process can do its work."""

SERVER_RUNS = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
"""It ends with the server."""
LISTENS = "uvicorn.Server.startup"
"""A coroutine; when it is done, the server listens."""
SERVES = "sglang.srt.entrypoints.http_server._wait_and_warmup"
"""When it returns, the server calls itself ready. It runs in a thread of the main process."""
SCHEDULER_BEGINS = f"{_SCHEDULER}.__init__"
"""By now the plugin's other hooks have had the model runner imported, which it need not be before."""
GRAPHS_BEGIN = f"{_SCHEDULER}.init_all_cuda_graphs"
"""By now the runners of GRAPHS are imported, which they need not be before."""
RANK_KNOWN = f"{_SCHEDULER}.init_model_config"
"""By now the process knows its rank."""
OUTPUT = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
"""Gets what every output batch holds: ``rids``, one for each request in it."""
SPAWN_DETOKENIZER = f"{_ENGINE}.Engine._launch_detokenizer_subprocesses"
DETOKENIZER_FUNCTION = "run_detokenizer_process_func"
"""Its keyword argument: what the process runs."""
SPAWNS_CONTROLLER = _ENGINE
CONTROLLER_FUNCTION = "run_data_parallel_controller_process"
"""The same as a global name of that module."""

NOT_IN = {
    "0.5.17": (
        "sglang.srt.server_args.ServerArgs.resolve_once", "sglang.srt.distributed.bootstrap.init_parallel_runtime",
    ),
    "0.5.23": ("sglang.srt.distributed.bootstrap.init_torch_distributed",),
}  # fmt: skip

ROLES = {
    "run_scheduler_process": "scheduler",
    "run_scheduler_process_with_init_pipe": "scheduler",
    "run_detokenizer_process": "detokenizer",
    CONTROLLER_FUNCTION: "controller",
}
"""What a child is, by the function that it runs."""


def loads_plugins(module: Any) -> bool:
    """Whether a child whose function is in ``module`` calls load_plugins: in 0.5.17 only schedulers do."""
    return hasattr(module, "load_plugins")


def rank_of(scheduler: Any) -> tuple[int, int]:
    """Global rank and number of the data parallel replica of a scheduler that is being made.

    0.5.17 keeps its topology in ``ps``; 0.5.23 has it process-wide.
    """
    topology = getattr(scheduler, "ps", None) or adapter.parallel()
    rank = int(topology.pp_rank * topology.tp_size + topology.tp_rank)
    return rank, int(getattr(topology, "dp_rank", None) or 0)


def is_health_check(rid: Any) -> bool:
    """Whether a request is one that /health makes to see that the engine works."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX)
