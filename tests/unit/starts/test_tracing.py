"""Hooks in the engine's processes, over stand-ins for SGLang's modules."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.starts.made import header
from weightcache.engine import adapter_phases as sglang, directive as directives, tracing
from weightcache.engine.directive import Directive, Milestone
from weightcache.starts import reading
from weightcache.starts.reading import Process
from weightcache.starts.record import encode

SCHEDULER = "sglang.srt.managers.scheduler"
ENGINE = "sglang.srt.entrypoints.engine"
HTTP = "sglang.srt.entrypoints.http_server"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No trace yet, and none of SGLang's modules."""
    own = tracing._Trace()
    monkeypatch.setattr(tracing, "_trace", own)
    tables = (sglang.ARGUMENTS, sglang.MAIN, sglang.SCHEDULER, sglang.GRAPHS, sglang.CONTROLLER, sglang.DETOKENIZER)
    for target in [target for table in tables for target in table] + [*sglang.READY, sglang.LISTENS, sglang.OUTPUT]:
        path = target.rpartition(".")[0]
        for name in (path, path.rpartition(".")[0]):
            monkeypatch.delitem(sys.modules, name, raising=False)
    module(monkeypatch, "sglang.srt.constants", HEALTH_CHECK_RID_PREFIX="HEALTH_CHECK")
    yield
    own.writer.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Milestone]:
    reports: list[Milestone] = []
    monkeypatch.setattr(directives, "send_report", lambda _, report: reports.append(report))
    monkeypatch.setattr(tracing.threading, "Thread", lambda target, **_: SimpleNamespace(start=target))
    return reports


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "000001.jsonl"
    path.write_bytes(encode(header(began=0.0)))
    return path


def directive(trace: Path | str, **changes: Any) -> Directive:
    return Directive("engine", "host", {}, "g", **{"trace": str(trace), "report": "/nowhere", **changes})


def as_child(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    target = SimpleNamespace(__name__=function)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(_target=target))


def process(trace: Path) -> Process:
    start = reading.parse(1, trace.read_bytes())
    assert start.damaged == 0
    (found,) = start.processes
    return found


def names(trace: Path) -> list[str]:
    return [span.name for span in process(trace).spans]


def test_a_scheduler_is_traced(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    as_child(monkeypatch, "run_scheduler_process")
    captured: list[int] = []
    runner = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"

    class Runner:
        def capture_one_shape(self, size: int, forward: object) -> int:
            captured.append(size)
            return size

    class Scheduler:
        def __init__(self) -> None:
            module(monkeypatch, runner, DecodeCudaGraphRunner=Runner)
            self.ps = SimpleNamespace(tp_size=4, tp_rank=1, pp_rank=1, dp_rank=2)
            self.init_model_config()
            sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner().load_model()
            self.init_all_cuda_graphs()

        def init_model_config(self) -> None: ...

        def init_all_cuda_graphs(self) -> None:
            assert [sys.modules[runner].DecodeCudaGraphRunner().capture_one_shape(size, None) for size in (4, 2)] == [
                4, 2,
            ]  # fmt: skip

        def run_event_loop(self) -> str:
            return "ended"

    class ModelRunner:
        def load_model(self) -> None: ...

    module(monkeypatch, SCHEDULER, Scheduler=Scheduler)
    tracing.setup(directive(trace))
    module(monkeypatch, "sglang.srt.model_executor.model_runner", ModelRunner=ModelRunner)  # imported by other hooks
    tracing.setup(directive(trace))  # SGLang may load its plugins again
    assert Scheduler().run_event_loop() == "ended"
    found = process(trace)
    assert (found.role, found.rank, found.replica, found.how) == ("scheduler", 5, 2, "cold")
    assert [(span.name, span.depth, span.size) for span in found.spans] == [
        ("imports", 0, 0), ("scheduler", 0, 0), ("model config", 1, 0), ("weights", 1, 0), ("graphs", 1, 0),
        ("decode graph", 2, 4), ("decode graph", 2, 2),
    ]  # fmt: skip
    assert all(span.end is not None for span in found.spans)
    assert "ready" in found.points
    assert captured == [4, 2]


def serve(monkeypatch: pytest.MonkeyPatch, outputs: list[tuple[bool, str]], warm_up: Callable[[], None]) -> Any:
    """The main process up to and with its outputs: (whether during the warm-up, the request)."""

    class TokenizerManager:
        def __init__(self) -> None: ...

        async def _handle_batch_output(self, output: Any) -> int:
            return len(output.rids)

    class Engine:
        @classmethod
        def _launch_scheduler_processes(cls) -> type:
            return cls

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *, run_detokenizer_process_func: Any) -> Any:
            return run_detokenizer_process_func

    class Server:
        async def startup(self, sockets: Any = None) -> str:
            return "listening"

    manager_module = module(monkeypatch, "sglang.srt.managers.tokenizer_manager", TokenizerManager=TokenizerManager)
    engine = module(monkeypatch, ENGINE, Engine=Engine, _wait_for_scheduler_ready=lambda: ["info"])
    uvicorn = module(monkeypatch, "uvicorn", Server=Server)

    def run(server_args: object) -> None:
        assert asyncio.run(uvicorn.Server().startup()) == "listening"
        http._wait_and_warmup()
        give(False)

    http = module(monkeypatch, HTTP, _setup_and_run_http_server=run, _wait_and_warmup=lambda: (give(True), warm_up()))

    def give(now: bool) -> None:
        for during, rid in outputs:
            if during == now:
                output = SimpleNamespace(rids=[rid])
                assert asyncio.run(manager._handle_batch_output(output)) == 1

    tracing.imported()
    assert engine.Engine._launch_scheduler_processes() is Engine
    manager = manager_module.TokenizerManager()
    assert engine._wait_for_scheduler_ready() == ["info"]
    return lambda: http._setup_and_run_http_server("args")


def test_the_main_process_is_traced(monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]) -> None:
    arguments = module(monkeypatch, "sglang.srt.server_args", prepare_server_args=lambda argv: ("made of", argv))
    monkeypatch.setattr(sys.modules["__main__"], "prepare_server_args", arguments.prepare_server_args, raising=False)
    tracing.setup(directive(trace))
    assert sys.modules["__main__"].prepare_server_args(["a"]) == ("made of", ["a"])  # type: ignore[attr-defined]
    serve(
        monkeypatch, [(True, "w"), (True, "w"), (False, "HEALTH_CHECK_1"), (False, "r"), (False, "r")], lambda: None
    )()
    found = process(trace)
    assert found.role == "main"
    assert [span.name for span in found.spans] == [
        "imports", "arguments", "imports", "spawn", "tokenizer", "waiting", "http server", "warm-up",
    ]  # fmt: skip
    assert all(span.end is not None for span in found.spans)
    assert list(found.points) == ["listening", "warm-up token", "serving", "first token"]
    assert [report.name for report in sent] == ["warm-up token", "serving", "first token"]
    assert [report.at for report in sent] == sorted(report.at for report in sent)


def test_without_a_warm_up_request_the_first_token_is_a_clients(
    monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]
) -> None:
    tracing.setup(directive(trace))
    serve(monkeypatch, [(False, "HEALTH_CHECK_1"), (False, "r")], lambda: None)()
    assert [report.name for report in sent] == ["serving", "first token"]


def test_a_warm_up_that_fails_is_no_serving(
    monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]
) -> None:
    def fails() -> None:
        raise ConnectionError

    tracing.setup(directive(trace))
    with pytest.raises(ConnectionError):
        serve(monkeypatch, [], fails)()
    assert sent == []
    assert process(trace).spans[-1].end is None


def test_a_process_that_was_handed_over_begins_there(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    tracing.begin()
    tracing.setup(directive(trace))
    found = process(trace)
    assert found.how == "warm"
    body = json.loads(trace.read_bytes().splitlines()[1])
    assert body["facts"]["began"] > body["facts"]["waited_since"]
    assert body["at"] - body["facts"]["began"] < 1.0


@pytest.mark.parametrize(
    "changes", [{"purpose": "loader"}, {"explain": True}, {"trace": "", "report": ""}, {"trace": "/nowhere/at/all"}]
)
def test_nothing_is_written_where_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, trace: Path, changes: dict[str, Any]
) -> None:
    values = {"purpose": "engine", "trace": str(trace), "report": "/nowhere", **changes}
    made = Directive(backend="host", sockets={}, group="g", **values)
    called = module(monkeypatch, "sglang.srt.server_args", prepare_server_args=lambda argv: argv)
    tracing.setup(made)
    tracing.imported()
    assert called.prepare_server_args(["a"]) == ["a"]
    assert len(trace.read_bytes().splitlines()) == 1


def test_a_hook_that_fails_disturbs_nobody(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    as_child(monkeypatch, "run_scheduler_process")

    class Scheduler:
        def init_model_config(self) -> str:
            return "config"

    module(monkeypatch, SCHEDULER, Scheduler=Scheduler)
    tracing.setup(directive(trace))
    monkeypatch.setattr(sglang, "rank_of", lambda _: 1 / 0)
    assert Scheduler().init_model_config() == "config"
    tracing._trace.writer.close()
    assert Scheduler().init_model_config() == "config"


def test_errors_of_sglang_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    as_child(monkeypatch, "run_scheduler_process")

    class Scheduler:
        def init_model_config(self) -> None:
            raise MemoryError("no room")

    module(monkeypatch, SCHEDULER, Scheduler=Scheduler)
    tracing.setup(directive(trace))
    with pytest.raises(MemoryError, match="no room"):
        Scheduler().init_model_config()
    assert process(trace).spans[-1].end is None


def run_detokenizer_process(where: str) -> str:
    return f"ran with {where}"


def test_children_that_load_no_plugins_are_traced(
    monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]
) -> None:
    tracing.setup(directive(trace))
    serve(monkeypatch, [], lambda: None)
    engine = sys.modules[ENGINE].Engine  # type: ignore[attr-defined]
    made = engine._launch_detokenizer_subprocesses(run_detokenizer_process_func=run_detokenizer_process)
    assert isinstance(made, tracing.Traced)
    assert (made.__name__, made.__module__) == ("run_detokenizer_process", __name__)
    child = pickle.loads(pickle.dumps(made))
    monkeypatch.setattr(tracing, "_trace", tracing._Trace())
    as_child(monkeypatch, "run_detokenizer_process")
    for name, value in directive(trace).environment().items():
        monkeypatch.setenv(name, value)
    assert child("there") == "ran with there"
    roles = [json.loads(line)["name"] for line in trace.read_bytes().splitlines() if b'"process"' in line]
    assert roles == ["main", "detokenizer"]


def test_children_that_load_plugins_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "load_plugins", lambda: None, raising=False)
    tracing.setup(directive(trace))
    serve(monkeypatch, [], lambda: None)
    engine = sys.modules[ENGINE].Engine  # type: ignore[attr-defined]
    made = engine._launch_detokenizer_subprocesses(run_detokenizer_process_func=run_detokenizer_process)
    assert made is run_detokenizer_process


def test_the_controller_of_replicas_is_traced(
    monkeypatch: pytest.MonkeyPatch, trace: Path, sent: list[Milestone]
) -> None:
    tracing.setup(directive(trace))
    module(monkeypatch, ENGINE, run_data_parallel_controller_process=run_detokenizer_process)
    tracing.imported()
    made = vars(sys.modules[ENGINE])["run_data_parallel_controller_process"]
    assert isinstance(made, tracing.Traced)


@pytest.mark.parametrize(
    ("function", "role"),
    [
        ("run_scheduler_process", "scheduler"),
        ("run_scheduler_process_with_init_pipe", "scheduler"),
        ("run_data_parallel_controller_process", "controller"),
        ("run_detokenizer_process", "detokenizer"),
        ("run_multi_detokenizer_router_process", "child"),
    ],
)
def test_roles(monkeypatch: pytest.MonkeyPatch, trace: Path, function: str, role: str) -> None:
    as_child(monkeypatch, function)
    tracing.setup(directive(trace))
    assert process(trace).role == role
