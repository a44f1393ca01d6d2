"""Runs inside one release's environment: compares every SGLang name that weightcache leans on with the real thing.

``python -m tests.engine.contract`` prints JSON: ``problems`` (sentences; none is right), and which of the arguments and
options that only some release has this one has.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

import weightcache
from tests.support.layouts import LAYOUTS
from tests.unit.memory.fake_driver import FakeDriver
from weightcache import sglang_options
from weightcache.deployment import Deployment
from weightcache.engine import (
    adapter,
    adapter_graphs,
    adapter_kv,
    adapter_phases as traced,
    adapter_server,
    adapter_slot,
    adapter_together,
    adapter_warm,
    evidence,
    gate,
    parked_buffers,
    parked_kv,
    refusals,
)
from weightcache.engine.kv_plan import Plan
from weightcache.errors import UnsupportedMethod
from weightcache.launch import arguments, server_only
from weightcache.memory.cuda_vmm import CudaMemory
from weightcache.warm import seats

PARALLEL = (
    "tp_size", "tp_rank", "pp_size", "pp_rank", "moe_ep_size", "moe_ep_rank", "attn_dp_size", "attn_cp_size",
    "moe_dp_size",
)  # fmt: skip
RESOLVED = ("json_model_override_args", "tp_size", "pp_size", "dp_size", "nnodes")
NOT_IN_0_5_17 = ("begin_weight_update", "end_weight_update")
LITERAL = ("--config",)
"""Options that SGLang looks for before argparse sees them, and in full only."""
METHODS = {"fp8": "Fp8LinearMethod", "awq": "AWQLinearMethod", "gptq": "GPTQLinearMethod"}


def resolve(target: str) -> Any:
    """The object with a dotted name. Raises ImportError or AttributeError."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name and not target.startswith(error.name):
                raise
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ImportError(target)


def parameters(function: Any) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def imports() -> Iterator[str]:
    """``from sglang... import name`` anywhere in weightcache: the name must be there."""
    root = Path(weightcache.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
                for alias in node.names:
                    try:
                        resolve(f"{node.module}.{alias.name}")
                    except (ImportError, AttributeError) as error:
                        yield f"{path.relative_to(root)}: from {node.module} import {alias.name}: {error}"


def targets() -> Iterator[str]:
    """Everything that a hook replaces."""
    verbs = [verb for verb in refusals.OUTPUTS if not (adapter.version() == "0.5.17" and verb in NOT_IN_0_5_17)]
    names = [
        adapter.LOAD_MODEL,
        adapter.GET_MODEL_LOADER,
        adapter.INIT_MEMORY_POOLS,
        adapter.RUN_EVENT_LOOP,
        adapter.ENABLE_OWN_CACHE,
        adapter.LOAD_PLUGINS,
        adapter_graphs.CAPTURE_PREFILL,
        adapter_graphs.PREFILL_CAPTURE,
        adapter_graphs.DECODE_CAPTURE,
        adapter_graphs.ON_IDLE,
        adapter_server.WAIT_AND_WARMUP,
        adapter_server.SERVER_STARTUP,
        adapter_kv.PROFILE_BYTES,
        adapter_kv.IS_BACKED_LATER,
        adapter_kv.BACK_NOW,
        adapter_kv.SHARE_WITH_STATES,
        adapter_kv.MAKE_LATENT,
        adapter_kv.MAKE_STATES,
        adapter_slot.INPUT,
        adapter_slot.SEND,
        adapter_slot.RANK_KNOWN,
        *(f"{adapter.WEIGHT_UPDATER}.{verb}" for verb in verbs),
        *(f"{adapter.TOKENIZER_CONTROL}.{verb}" for verb in verbs if verb.endswith("memory_occupation")),
    ]
    for name in names:
        try:
            if not callable(resolve(name)):
                yield f"{name} cannot be called"
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
    for verb in verbs:
        if len(parameters(resolve(f"{adapter.WEIGHT_UPDATER}.{verb}"))) != 2:
            yield f"{verb} does not take one request"


def signatures() -> Iterator[str]:
    """Parameters that weightcache passes."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import data_parallel_controller, scheduler
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import prepare_server_args

    wanted = {
        "server_args", "init_tokenizer_manager_func", "run_scheduler_process_func", "run_detokenizer_process_func",
    }  # fmt: skip
    if missing := wanted - set(parameters(engine.Engine._launch_subprocesses)):
        yield f"Engine._launch_subprocesses lacks {sorted(missing)}"
    for module in (engine, data_parallel_controller):
        if not callable(getattr(module.mp, "Process", None)):
            yield f"{module.__name__}.mp has no Process"
    if "run_scheduler_process_func" not in parameters(engine.Engine._launch_scheduler_processes):
        yield "Engine._launch_scheduler_processes takes no run_scheduler_process_func"
    if "pipe_writer" not in parameters(engine.run_data_parallel_controller_process):
        yield "run_data_parallel_controller_process takes no pipe_writer"
    if parameters(scheduler.get_exception_traceback):
        yield "the scheduler's get_exception_traceback takes something"
    if "server_args" not in parameters(scheduler.run_scheduler_process):
        yield "run_scheduler_process takes no server_args"
    if len(parameters(prepare_server_args)) != 1:
        yield "prepare_server_args does not take one list"
    for name in adapter.SUPPORTED_LOADERS:
        cls = getattr(loader, name)
        keywords = inspect.signature(cls.load_model).parameters
        if set(keywords) != {"self", "model_config", "device_config"}:
            yield f"{name}.load_model takes {list(keywords)}"
        if not any("_initialize_model" in inspect.getsource(base) for base in cls.__mro__[:-1]):
            yield f"{name} does not construct its model by _initialize_model"
        if not callable(getattr(cls, "_get_all_weights", None)):
            yield f"{name} has no _get_all_weights"
    if parameters(loader._initialize_model)[:3] != ["model_config", "load_config", "quant_config"]:
        yield f"_initialize_model takes {parameters(loader._initialize_model)}"
    if parameters(loader._get_quantization_config)[:2] != ["model_config", "load_config"]:
        yield f"_get_quantization_config takes {parameters(loader._get_quantization_config)}"
    with set_default_torch_dtype(torch.float16):
        if torch.get_default_dtype() is not torch.float16:
            yield "set_default_torch_dtype does nothing"
    names = ("tqdm", "freeze_gc", "graph_capture")
    prefill, decode = (
        importlib.import_module(name.rpartition(".")[0])
        for name in (adapter_graphs.PREFILL_RUNNER, adapter_graphs.DECODE_RUNNER)
    )
    for module in (prefill, decode):
        if missing := [name for name in names if not hasattr(module, name)]:
            yield f"{module.__name__} lacks {missing}"
        if "stream" not in parameters(module.graph_capture):
            yield f"{module.__name__}'s graph_capture takes no stream"
    for inputs in (prefill.PrefillInputBuffers, decode.DecodeInputBuffers):
        if not callable(getattr(inputs, "reset_index_buffers", None)):
            yield f"{inputs.__name__} has no reset_index_buffers"
    source = inspect.getsource(decode.DecodeCudaGraphRunner)
    for name in ("capture_bs", "disable_padding", "stream", "device_module"):
        if f"self.{name}" not in source:
            yield f"DecodeCudaGraphRunner has no {name}"
    if "self.capture_bs" not in inspect.getsource(decode.DecodeCudaGraphRunner._capture_one_stream):
        yield "DecodeCudaGraphRunner captures other sizes than those of capture_bs"
    if "self.capture_bs" not in inspect.getsource(decode.DecodeCudaGraphRunner.load_batch):
        yield "DecodeCudaGraphRunner pads to other sizes than those of capture_bs"
    if not isinstance(HookRegistry._hooks, dict) or not isinstance(HookRegistry._patched, set):
        yield "HookRegistry keeps its hooks elsewhere"
    if parameters(HookRegistry.register)[:3] != ["target", "hook", "hook_type"]:
        yield f"HookRegistry.register takes {parameters(HookRegistry.register)}"
    if not hasattr(HookType, "AROUND") or not callable(HookRegistry.apply_hooks):
        yield "HookRegistry has no AROUND hooks"


def ranks_alone() -> Iterator[str]:
    """By what a rank waits for others: all of it is known, so that one can be kept from it."""
    cls = resolve(adapter_together.COORDINATOR)
    public = {name for name, found in vars(cls).items() if inspect.isfunction(found) and not name.startswith("_")}
    if unknown := public - {*adapter_together.METHODS, *adapter_together.HARMLESS}:
        yield f"GroupCoordinator waits for others in {sorted(unknown)}"
    absent = {"send_recv_tensor_dict"} if adapter.version() == "0.5.17" else set()
    if absent != set(adapter_together.METHODS) - public:
        yield f"GroupCoordinator lacks {sorted(set(adapter_together.METHODS) - public)}"
    asking = importlib.import_module("sglang.srt.distributed.device_communicators.triton_symm_mem_ag")
    if "get_parallel().nnodes > 1\n" not in inspect.getsource(asking):
        yield "models ask in other cases which ranks share a host"
    if parameters(resolve("sglang.srt.distributed.parallel_state.in_the_same_node_as")) != ["pg", "source_rank"]:
        yield "in_the_same_node_as takes something else"
    if "self.world_size = " not in inspect.getsource(cls.__init__):
        yield "GroupCoordinator has no world_size"
    if missing := [name for name in adapter_together.FUNCTIONS if not callable(getattr(torch.distributed, name, None))]:
        yield f"torch.distributed lacks {missing}"
    with adapter_together.alone():
        try:
            cls.all_reduce(SimpleNamespace(world_size=2), torch.ones(1))
            yield "a rank that is alone reduces with others"
        except adapter_together.NeedsOthers:
            pass


def start_phases() -> Iterator[str]:
    """What is marked while an engine starts (weightcache.engine.tracing)."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import data_parallel_controller, detokenizer_manager, scheduler

    old = adapter.version() == "0.5.17"
    tables = (traced.ARGUMENTS, traced.MAIN, traced.SCHEDULER, traced.GRAPHS, traced.CONTROLLER, traced.DETOKENIZER)
    moments = (
        *traced.READY, traced.SERVER_RUNS, traced.LISTENS, traced.SERVES, traced.OUTPUT, traced.RANK_KNOWN,
        traced.GRAPHS_BEGIN, traced.SCHEDULER_BEGINS, traced.SPAWN_DETOKENIZER,
    )  # fmt: skip
    for target in [*(target for table in tables for target in table), *moments]:
        there = True
        try:
            there = callable(resolve(target))
        except (ImportError, AttributeError):
            there = False
        absent = target in traced.NOT_IN[adapter.version()]
        if there == absent:
            yield f"{target} is {'there' if there else 'not there'}"
    for target in (traced.LISTENS, traced.OUTPUT):
        if not inspect.iscoroutinefunction(resolve(target)):
            yield f"{target} is no coroutine"
    for target in traced.GRAPHS:
        if parameters(resolve(target))[1] not in ("size", "bs"):
            yield f"{target} does not take a size first"
    if len(parameters(resolve(traced.OUTPUT))) != 2 or ".rids" not in inspect.getsource(resolve(traced.OUTPUT)):
        yield f"{traced.OUTPUT} does not take an output with rids"
    if HEALTH_CHECK_RID_PREFIX != "HEALTH_CHECK":
        yield f"health checks begin with {HEALTH_CHECK_RID_PREFIX}"
    name = traced.DETOKENIZER_FUNCTION
    if f"{name}={name}" not in inspect.getsource(engine.Engine._launch_subprocesses):
        yield f"{traced.SPAWN_DETOKENIZER} does not get {name} by its name"
    if not callable(getattr(engine, traced.CONTROLLER_FUNCTION, None)):
        yield f"{engine.__name__} has no {traced.CONTROLLER_FUNCTION}"
    for module in (detokenizer_manager, data_parallel_controller):
        if traced.loads_plugins(module) == old:
            yield f"{module.__name__} loads plugins: {not old} was expected"
    for function in traced.ROLES:
        modules = (scheduler, detokenizer_manager, data_parallel_controller)
        if not any(hasattr(module, function) for module in modules) and not (old and function.endswith("_init_pipe")):
            yield f"no process runs {function}"
    if old and "self.ps = " not in inspect.getsource(scheduler.Scheduler.__init__):
        yield "schedulers have no ps"


def warm_workers() -> Iterator[str]:
    """What parked processes import exists, and the functions that SGLang's children run are known by their modules.

    Comes first: it looks at what is imported, too.
    """
    for name in sorted({module for modules in adapter_warm.IMPORTS.values() for module in modules}):
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"{name}: {error}"
    if adapter_warm.SERVER_MODULE in sys.modules:
        yield f"{adapter_warm.SERVER_MODULE} is imported under its own name, and runpy will complain"
    if "prometheus_client.values" in sys.modules:
        yield "prometheus_client is imported early, and reads PROMETHEUS_MULTIPROC_DIR then"
    for kind, target in (
        ("scheduler", f"{adapter_warm.SCHEDULER}.run_scheduler_process"),
        ("detokenizer", f"{adapter_warm.DETOKENIZER}.run_detokenizer_process"),
    ):
        if adapter_warm.kind(resolve(target), ()) != kind:
            yield f"{target} is not known as a {kind}"
    controller = importlib.import_module("sglang.srt.managers.data_parallel_controller")
    prelaunched = getattr(controller, adapter_warm.PRELAUNCHED, None)
    scheduler = resolve(f"{adapter_warm.SCHEDULER}.run_scheduler_process")
    if prelaunched is None and adapter.version() != "0.5.17":
        yield f"{adapter_warm.PRELAUNCHED} is gone"
    elif prelaunched is not None and adapter_warm.kind(prelaunched, (scheduler, None)) != "scheduler":
        yield f"{adapter_warm.PRELAUNCHED} is not known as a scheduler"
    command = " ".join(map(os.fsdecode, spawn.get_command_line(tracker_fd=5, pipe_handle=7)))
    if not seats.COMMAND.search(command):
        yield f"multiprocessing spawns by another command: {command}"


def kv_memory() -> Iterator[str]:
    """How a KV pool is made whose memory comes later, and what stands in for the owner of its buffers."""
    from sglang.srt.mem_cache import kv_vmm_backing, memory_pool
    from sglang.srt.model_executor.model_runner_components import kv_pool_runtime

    owner = kv_vmm_backing.KvVmmBufferOwner
    if getattr(memory_pool, adapter_kv.OWNER, None) is not owner:
        yield f"{adapter_kv.MEMORY_POOL} has no {adapter_kv.OWNER}"
    if wanted := set(parameters(owner)) ^ set(parameters(parked_buffers.KvBuffers)):
        yield f"KvBuffers takes other arguments than KvVmmBufferOwner: {sorted(wanted)}"
    for name in ("ensure_prefix", "finalize", "close", "backed_bytes"):
        if not (hasattr(owner, name) and hasattr(parked_buffers.KvBuffers, name)):
            yield f"KvVmmBufferOwner or KvBuffers has no {name}"
    source = inspect.getsource(memory_pool.MHATokenToKVPool)
    used = set(re.findall(r"self\._post_capture_owner\.(\w+)", source))
    if used - {"tensors", "finalize", "backed_bytes", "close"}:
        yield f"a pool uses more of the owner of its buffers: {sorted(used)}"
    for name in ("reserved_span_bytes", "prefix_span_bytes", "final_span_bytes"):
        if not callable(getattr(memory_pool.KvBufferDesc, name, None)):
            yield f"KvBufferDesc has no {name}"
    if "is_draft_worker" not in parameters(kv_pool_runtime.is_post_capture_kv_active):
        yield "is_post_capture_kv_active takes no is_draft_worker"
    if parameters(memory_pool.MHATokenToKVPool.finalize_backing)[1:] != ["config"]:
        yield "finalize_backing takes something else"
    if parameters(resolve(adapter_kv.SHARE_WITH_STATES)) != ["self", "total_rest_memory"]:
        yield f"{adapter_kv.SHARE_WITH_STATES} takes something else"
    if "self._handle_max_mamba_cache(rest_memory)" not in inspect.getsource(resolve(adapter_kv.PROFILE_BYTES)):
        yield f"{adapter_kv.PROFILE_BYTES} gives states their share in another way"
    for name in ("is_deepseek_dsa", "is_deepseek_v4", "is_minimax_sparse"):
        if parameters(resolve(f"sglang.srt.configs.model_config.{name}")) != ["config"]:
            yield f"{name} takes something else"
    speculative = importlib.import_module("sglang.srt.speculative.base_spec_worker")
    for owner_, name in (
        (speculative.BaseSpecWorker, "draft_worker"),
        (speculative.EagleDraftWorkerBase, "draft_runners"),
    ):
        if not isinstance(vars(owner_).get(name), property):
            yield f"{owner_.__name__} has no {name}"
    for name in adapter_kv.POOLS:
        resolve(f"sglang.srt.mem_cache.{'swa_memory_pool' if name == 'SWAKVPool' else 'memory_pool'}.{name}")


def parked_pools() -> Iterator[str]:
    """SGLang's own pools of zeros make all of their large buffers as parked ones; with host memory for GPU memory."""
    from sglang.srt.mem_cache import memory_pool

    latent, states = memory_pool.MLATokenToKVPool, memory_pool.MambaPool
    make_latent, make_states = latent._create_buffers, states.__init__
    hooks = parked_kv.hooks(Plan(Path("plan"), Path("lock")), lambda _: None)
    made: list[torch.Tensor] = []

    def tensor(_: Any, __: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.zeros(shape, dtype=dtype))
        return made[-1]

    def memory(device: int) -> CudaMemory:
        return CudaMemory(device, FakeDriver(free=1 << 40))

    with (
        mock.patch.object(parked_buffers, "_DEVICE", "cpu"),
        mock.patch.object(parked_buffers.Parked, "memory", staticmethod(memory)),
        mock.patch.object(parked_buffers.CudaBacked, "tensor", tensor),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(latent, "_create_buffers", lambda pool: hooks[adapter_kv.MAKE_LATENT](make_latent, pool)),
        mock.patch.object(
            states, "__init__", lambda *args, **kwargs: hooks[adapter_kv.MAKE_STATES](make_states, *args, **kwargs)
        ),
    ):
        one = latent(
            1 << 16, page_size=64, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=3,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        if [id(buffer) for buffer in one.kv_buffer] != [id(buffer) for buffer in made]:
            yield f"{len(made)} of the {len(one.kv_buffer)} buffers of MLATokenToKVPool are parked"
        made.clear()
        shape = SimpleNamespace(conv=[(256, 3)], temporal=(4, 64, 64))
        dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
        two = states(
            size=256, spec_state_size=8, cache_params=SimpleNamespace(shape=shape, dtype=dtype, is_kda=False),
            mamba_layer_ids=[0, 1], device="cpu",
        )  # fmt: skip
        if two.mamba_cache.temporal is not made[-1]:
            yield "the states of MambaPool are not parked"


def slots() -> Iterator[str]:
    """How an engine in a slot is directed: what talks to its own port, ends requests, and comes round in each loop."""
    from sglang.srt.configs import model_config
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import io_struct, tokenizer_manager
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    root = Path(inspect.getfile(http_server)).parents[2]
    asking = {str(path.relative_to(root)) for path in root.rglob("srt/**/*.py") if ".url()" in path.read_text()}
    if asking != {"srt/entrypoints/http_server.py", "srt/entrypoints/http_server_engine.py"}:
        yield f"others ask this server's own address: {sorted(asking)}"
    own = ["_execute_server_warmup", *(["_freeze_gc_after_server_warmup"] if adapter.version() != "0.5.17" else [])]
    source = inspect.getsource(http_server)
    found = [function for function in own if ".url()" in inspect.getsource(getattr(http_server, function))]
    if found != own or source.count(".url()") != len(own):
        yield f"http_server asks its own address elsewhere than in {own}"
    for function in own:
        for call in ast.walk(ast.parse(inspect.getsource(getattr(http_server, function)))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("requests.get", "requests.post"):
                given = {keyword.arg for keyword in call.keywords}
                if len(call.args) != 1 or not given <= {"json", "headers", "timeout", "verify"}:
                    yield f"{function} asks with {sorted(map(str, given))}"
    if "abort_all" not in parameters(TokenizerManager.abort_request):
        yield "abort_request takes no abort_all"
    manager = inspect.getsource(tokenizer_manager)
    if "self.rid_to_state: Dict[str, ReqState] = {}" not in manager:
        yield "the tokenizer manager does not know its requests as rid_to_state"
    work = {name for name in vars(io_struct) if re.fullmatch(r"(Batch)?Tokenized\w+ReqInput", name)}
    if work != set(adapter_slot.WORK):
        yield f"requests that use KV memory are {sorted(work)}"
    for part in ("self.model_config = ", "self.server_args = server_args"):
        if part not in manager:
            yield f"the tokenizer manager has no {part}"
    for name in ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput"):
        fields = getattr(io_struct, name).__annotations__
        if not {"input_ids", "sampling_params"} <= set(fields) or "batch" in fields:
            yield f"{name} has the fields {sorted(fields)}"
        if "batch" not in getattr(io_struct, f"Batch{name}").__annotations__:
            yield f"Batch{name} has no batch"
    if "self.is_multimodal = " not in inspect.getsource(model_config):
        yield "a model's configuration does not say whether it is multimodal"
    for name in ("_send_one_request", "_send_batch_request"):
        if "self._dispatch_to_scheduler(" not in inspect.getsource(getattr(TokenizerManager, name)):
            yield f"{name} sends in another way"
    if parameters(TokenizerManager._dispatch_to_scheduler) != ["self", "obj"]:
        yield "_dispatch_to_scheduler takes something else"
    flushing = inspect.getsource(TokenizerManager.flush_cache)
    for part in ("self.auto_create_handle_loop()", "self.flush_cache_communicator(FlushCacheReqInput(timeout_s="):
        if part not in flushing:
            yield f"flush_cache has no {part}"
    taking = "process_input_requests("
    if (ingest := getattr(Scheduler, "ingest_requests", None)) is not None:
        if f"        self.{taking}" not in inspect.getsource(ingest):
            yield "ingest_requests does not always process"
        taking = "ingest_requests("
    loops = [name for name in dir(Scheduler) if name.startswith("event_loop_")]
    if len(loops) < 9:
        yield f"schedulers have the loops {loops}"
    for name in loops:
        if f"self.{taking}" not in inspect.getsource(getattr(Scheduler, name)):
            yield f"{name} takes its requests elsewhere"


def uvicorn_server() -> Iterator[str]:
    """What is done with uvicorn's server besides starting it."""
    import uvicorn
    from uvicorn.server import ServerState

    source = inspect.getsource(uvicorn.Server.startup)
    for part in ("config.http_protocol_class(", "server_state=self.server_state", "app_state=self.lifespan.state",
                 "ssl=config.ssl", "backlog=config.backlog", "self.servers"):  # fmt: skip
        if part not in source:
            yield f"uvicorn.Server.startup has no {part}"
    if not hasattr(ServerState(), "connections") or not hasattr(uvicorn.Server, "_log_started_message"):
        yield "uvicorn.Server keeps no connections, or says nothing"
    for name in ("h11_impl", "httptools_impl"):  # read, since httptools need not be there
        protocol = Path(inspect.getfile(uvicorn)).with_name("protocols").joinpath("http", f"{name}.py").read_text()
        for part in ("self.app = config.loaded_app", "self.cycle", "def shutdown(self)", "self.transport"):
            if part not in protocol:
                yield f"{name} has no {part}"


def modelopt() -> Iterator[str]:
    """Of a checkpoint that ModelOpt has quantized, its loader is the default one and nothing else."""
    from sglang.srt.model_loader.loader import DefaultModelLoader, ModelOptModelLoader

    source = inspect.getsource(ModelOptModelLoader.load_model)
    parts = ("if model_config._is_already_quantized():", "return super().load_model(", "self._standard_quantization_")
    places = [source.find(part) for part in parts]
    if -1 in places or places != sorted(places) or ModelOptModelLoader.__bases__ != (DefaultModelLoader,):
        yield "ModelOptModelLoader is not the default loader for checkpoints that are quantized"
    if own := set(vars(ModelOptModelLoader)) & {"_get_all_weights", "load_weights_and_postprocess", "_prepare_weights"}:
        yield f"ModelOptModelLoader has {sorted(own)} of its own"


def baseline() -> Iterator[str]:
    """How this release is told about resident memory, by one way or the other."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    source = inspect.getsource(ModelRunner)
    if not hasattr(ModelRunner, "account_preloaded_weights") and "pre_model_load_memory" not in source:
        yield "the baseline of the KV pool cannot be told about resident weights"
    if adapter.version() == "0.5.23":
        scheduler = inspect.getsource(importlib.import_module(adapter.SCHEDULER_MODULE))
        if "preloaded_weights_bytes" not in scheduler + source:
            yield "nobody reads preloaded_weights_bytes"


def answers() -> Iterator[str]:
    """The types by which verbs are refused."""
    from sglang.srt.managers import io_struct

    for verb, name in refusals.OUTPUTS.items():
        if adapter.version() == "0.5.17" and verb in NOT_IN_0_5_17:
            continue
        cls = getattr(io_struct, name, None)
        if cls is None:
            yield f"io_struct has no {name}"
        elif verb.endswith("memory_occupation"):
            if cls(rid="a").rid != "a":
                yield f"{name} carries no rid"
        elif (made := cls(success=False, message="a")).success or made.message != "a":
            yield f"{name} carries no message"


def topology() -> Iterator[str]:
    """What the fingerprint reads of the parallel topology."""
    from sglang.srt import runtime_context

    source = inspect.getsource(runtime_context)
    for name in PARALLEL:
        if name not in source:
            yield f"the parallel topology has no {name}"


def server_arguments() -> set[str]:
    """The names of all server arguments."""
    from sglang.srt.server_args import ServerArgs

    return set(parameters(ServerArgs))


def parser() -> argparse.ArgumentParser:
    """SGLang's own command line."""
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def spellings(options: set[str]) -> Iterator[str]:
    """The launcher reads every abbreviation that argparse would take for an option, and none that means another.

    What argparse finds ambiguous does not matter: SGLang refuses it.
    """
    tables = {**sglang_options.SPELLINGS, **sglang_options.FLAGS}
    mine = {spelling: field for field, table in tables.items() for spelling in table}
    for spelling in mine:
        if spelling not in options or not spelling.startswith("--") or spelling in LITERAL:
            continue
        for length in range(3, len(spelling) + 1):
            prefix = spelling[:length]
            matches = [prefix] if prefix in options else [option for option in options if option.startswith(prefix)]
            read = sglang_options.given([prefix, "1"]).values
            if len(matches) == 1:
                expected = mine.get(matches[0])
                if set(read) != ({expected} if expected else set()):
                    yield f"{prefix} is {matches[0]}, which the launcher reads as {sorted(read) or 'nothing'}"


def layouts() -> Iterator[str]:
    """Ranks, nodes and GPUs of a deployment are those that SGLang's own launch gives them."""
    from sglang.srt.weight_cache.protocol import compute_local_gpu_id

    for deployment in (layout.deployment for layout in LAYOUTS):
        of_replica = deployment.world * deployment.gpu_id_step
        for node in range(deployment.node_count):
            pp_ranks, tp_ranks, stages, tp_here = _rank_ranges(deployment, node)
            expected = [
                (
                    replica * deployment.world + pp * deployment.tp_size + tp,
                    replica * of_replica
                    + compute_local_gpu_id(pp, tp, stages, tp_here, deployment.base_gpu_id, deployment.gpu_id_step),
                )
                for replica in range(deployment.replicas)
                for pp in pp_ranks
                for tp in tp_ranks
            ]
            mine = [(rank, deployment.gpu_index(rank)) for rank in deployment.of_node(node)]
            if mine != expected:
                yield f"{deployment}: node {node} has (rank, GPU) {mine}, SGLang's launch {expected}"


def _rank_ranges(deployment: Deployment, node: int) -> tuple[range, range, int, int]:
    from sglang.srt.entrypoints import engine

    sizes = {"nnodes": deployment.node_count, "pp_size": deployment.pp_size, "tp_size": deployment.tp_size}
    calculate: Any = engine._calculate_rank_ranges
    if len(parameters(calculate)) > 1:
        return tuple(calculate(*sizes.values(), node))  # type: ignore[return-value]
    with mock.patch.object(engine, "get_parallel", return_value=SimpleNamespace(**sizes)):
        return tuple(calculate(node))  # type: ignore[return-value]


def mode(options: set[str]) -> Iterator[str]:
    """The option that the launcher consumes, and its abbreviations."""
    if arguments.MODE not in options:
        yield f"there is no {arguments.MODE}"
    shortest = arguments.MODE_SHORTEST
    if [option for option in options if option.startswith(shortest)] != [arguments.MODE]:
        yield f"{shortest} is not unambiguous"
    if len([option for option in options if option.startswith(shortest[:-1])]) == 1:
        yield f"{shortest} is not the shortest abbreviation"


def methods() -> Iterator[str]:
    """The evidence names real methods, and the gate refuses real quantized ones by name."""
    known = {proof.method.partition("(")[0] for proof in evidence.packaged()}
    for name in sorted(known):
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            yield f"evidence for a method that is not there: {name}: {error}"
    for module, name in METHODS.items():
        try:
            cls = resolve(f"sglang.srt.layers.quantization.{module}.{name}")
        except (ImportError, AttributeError):
            continue
        try:
            gate.check(_model(cls), adapter.version(), "")
        except UnsupportedMethod as error:
            if name not in error.message or "layer" not in error.message:
                yield f"{name} is refused without its name: {error.message}"
        else:
            yield f"{name} passes the gate"
    for name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        for capability in ("", "9.0"):
            gate.check(_model(resolve(f"sglang.srt.layers.quantization.unquant.{name}")), adapter.version(), capability)


def _model(method: type) -> nn.Module:
    """A model of one layer that computes by ``method``."""
    layer, model = nn.Module(), nn.Module()
    vars(layer)["quant_method"] = object.__new__(method)
    model.add_module("layer", layer)
    return model


def main() -> int:
    """Print what was found."""
    checks = (
        warm_workers, imports, targets, signatures, modelopt, baseline, answers, topology, layouts, methods,
        ranks_alone, start_phases, kv_memory, parked_pools, slots, uvicorn_server,
    )  # fmt: skip
    problems = [problem for check in checks for problem in check()]
    options = set(parser()._option_string_actions)
    problems += [*spellings(options), *mode(options)]
    known = server_arguments()
    refusing = (*adapter.REFUSED_ARGUMENTS, *adapter_slot.REFUSED_ARGUMENTS, *adapter_kv.UNSUPPORTED)
    refused = {name for name, *_ in refusing}
    listed = refused | set(adapter.BACKEND_ARGUMENTS) | set(RESOLVED)
    tables = {**sglang_options.SPELLINGS, **sglang_options.FLAGS}
    wanted = {spelling for table in tables.values() for spelling in table} | set(
        server_only.SECRET + server_only.SERVING
    )
    report = {
        "version": adapter.version(),
        "problems": problems,
        "arguments": {name: name in known for name in sorted(listed)},
        "options": {name: name in options for name in sorted(wanted)},
    }
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
