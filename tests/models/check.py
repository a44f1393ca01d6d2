"""Does SGLang's CUDA code take the checkpoints of tests/models/kinds.py, and can what it makes of them be shared?

    python -m tests.models.check [KIND...]

Makes the checkpoint of each kind (by default of all that differ in more than size). Its model is built on ``meta``
with the classes that an H200 would get (tests/models/pretend.py), and every tensor of its file goes through
``load_weights``, which checks names and shapes.
Then the model is loaded and carried into another one (tests/models/carry.py). Prints one JSON object a line: how many
layers use which method, tensors that nothing took, parameters that nothing filled, tensors that were carried, the
manifest's size, milliseconds of each step, and what became different.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import carry, pretend
from tests.models.companions import DRAFTS
from tests.models.kinds import DIFFERENT, KINDS
from tests.models.pretend import Elsewhere

ARGUMENTS = (
    *("--device", "cuda", "--attention-backend", "triton"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
)
_TAKES = frozenset({"copy_", "_to_copy", "clone", "cat", "fill_", "_local_scalar_dense"})
_FILLS = frozenset({"copy_", "fill_"})


@dataclass(slots=True)
class Report:
    """What became of one kind."""

    kind: str
    methods: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    unused: list[str] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    carried: int = 0
    manifest: int = 0
    milliseconds: dict[str, float] = field(default_factory=dict)
    deviations: list[str] = field(default_factory=list)
    error: str = ""


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sees which checkpoint tensors are copied somewhere, and into which storages."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        self.used: set[str] = set()
        self.filled: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _TAKES:
            for tensor in _tensors(args):
                self.used |= {self.names[key] for key in (tensor.untyped_storage()._cdata,) if key in self.names}
        if name in _FILLS:
            self.filled.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Some models load with threads, which a dispatch mode does not see."""

    def at_once(_self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(function(*args, **kwargs))
        return done

    with mock.patch.object(concurrent.futures.ThreadPoolExecutor, "submit", at_once):
        yield


def configure(model: Path, options: Sequence[str]) -> tuple[Any, Any]:
    """SGLang's state of this process for the checkpoint ``model``; the configurations of its model and its loading."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.server_args import prepare_server_args

    with Elsewhere("cpu"):
        server_args = prepare_server_args(["--model-path", str(model), *ARGUMENTS, *options])
        # 0.5.23 wants to know which process of the launch this is.
        ranks = getattr(runtime_context, "SpawnRanks", None)
        place = {"ranks": ranks(world_rank=0, gpu_id=0)} if ranks else {}
        runtime_context.publish(server_args, role="weight_cache_daemon", **place)
        config = ModelConfig.from_server_args(server_args)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=address, local_rank=0, backend="gloo"
        )
        initialize_model_parallel()
        for initialize in (initialize_dp_attention, initialize_moe_config, initialize_fp8_gemm_config):
            taken = len(inspect.signature(initialize).parameters)  # releases differ
            initialize(*(server_args, config)[:taken])
    return config, LoadConfig()


def check(report: Report, model: Path, config: Any, load: Any) -> None:
    """Build the model on ``meta`` and load the checkpoint in ``model`` into it."""
    from weightcache.engine import adapter, methods

    with Elsewhere("meta"):
        built = adapter.build_on_meta(config, load)
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    watch = _Watch(tensors)
    with _one_thread(), Elsewhere("meta"), watch:
        built.load_weights(iter(tensors.items()))
    filled = {name for name, value in built.named_parameters() if value.untyped_storage()._cdata in watch.filled}
    report.methods = methods.count(built)
    report.tensors = len(tensors)
    report.unused = sorted(tensors.keys() - watch.used)
    report.unfilled = sorted({name for name, _ in built.named_parameters()} - filled)


def _in_a_child(kind: str, part: str = "") -> None:
    """SGLang's process-wide state is made once: a child for each kind, after the imports, which take longest."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    out = os.dup(1)
    os.dup2(2, 1)  # whatever SGLang prints
    report = Report(f"{kind}/{part}" if part else kind)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{kind}-") as folder:
            KINDS[kind].make(Path(folder))
            model = Path(folder, part)
            config, load = configure(model, [] if part else KINDS[kind].arguments(model))
            check(report, model, config, load)
            carried = carry.carry(config, load)
            report.methods, report.carried, report.deviations = carried.methods, carried.tensors, carried.deviations
            report.manifest, report.milliseconds = carried.manifest, carried.milliseconds
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    os.write(out, (json.dumps(dataclasses.asdict(report)) + "\n").encode())
    os._exit(0)


def main(kinds: Iterable[str]) -> None:
    """Check all, one after the other."""
    pretend.gpu()
    with Elsewhere("cpu"):
        import sglang.srt.model_loader.loader
        import sglang.srt.models.registry
        import sglang.srt.server_args  # noqa: F401
    for kind in kinds:
        _in_a_child(kind)
        if KINDS[kind].companion in DRAFTS:
            _in_a_child(kind, "draft")


if __name__ == "__main__":
    main(sys.argv[1:] or DIFFERENT)
