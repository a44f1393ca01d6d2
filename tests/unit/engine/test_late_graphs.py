"""Graphs that are captured later: what is asked of SGLang, in which order, and when nothing is deferred."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcache.engine import adapter, adapter_graphs, late_graphs, state

SIZES = [4, 16, 64]
DECODE_SIZES = [1, 2, 4, 8, 12, 24, 48, 64]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Backend:
    """Of SGLang's breakable back end: the buffer that all graphs of one capture write to."""

    def __init__(self) -> None:
        self._shared_output_buffer: Any = None
        self.graphs: dict[int, Any] = {}

    def _alloc_full_buffer(self, size: int) -> object:
        return [size]

    def capture_session(self, sizes: list[int]) -> None:
        self._shared_output_buffer = None
        for size in reversed(sizes):
            if self._shared_output_buffer is None:
                self._shared_output_buffer = self._alloc_full_buffer(size)
            self.graphs[size] = self._shared_output_buffer


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the place of SGLang's prefill_cuda_graph_runner, with what adapter_graphs replaces there."""
    module: Any = types.ModuleType("fake_prefill_runner")
    module.bars = []
    module.streams = []
    module.synchronized = []
    module.collections = []

    class Bar:
        def __init__(self, sizes: list[int]) -> None:
            module.bars.append(sizes)
            self.sizes = sizes

    @contextmanager
    def freeze_gc(enabled: bool) -> Iterator[None]:
        module.collections.append(enabled)
        yield

    @contextmanager
    def graph_capture(stream: object = None) -> Iterator[None]:
        module.streams.append(stream or object())
        yield module.streams[-1]

    class PrefillCudaGraphRunner:
        def __init__(self) -> None:
            self.buffers = SimpleNamespace(reset_index_buffers=lambda: module.reset.append(len(self.backend.graphs)))
            self.device_module = SimpleNamespace(
                Stream=object, synchronize=lambda: module.synchronized.append(len(self.backend.graphs))
            )
            self.capture_num_tokens = list(SIZES)
            self.backend = Backend()
            self.collecting: list[bool] = []
            self.capture = self.real_capture

        def real_capture(self) -> None:
            with module.freeze_gc(False), module.graph_capture():
                self.collecting.append(gc.isenabled())
                shown = module.tqdm.tqdm(self.capture_num_tokens)
                if hasattr(shown, "set_description"):
                    shown.set_description("...")
                self.backend.capture_session(self.capture_num_tokens)

    PrefillCudaGraphRunner.__module__ = module.__name__
    module.PrefillCudaGraphRunner = PrefillCudaGraphRunner
    module.tqdm = SimpleNamespace(tqdm=Bar)
    module.freeze_gc = freeze_gc
    module.graph_capture = graph_capture
    module.reset = []
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(adapter_graphs, "is_prefill_runner", lambda runner: isinstance(runner, PrefillCudaGraphRunner))
    monkeypatch.setattr(adapter_graphs, "no_graphs", lambda: SimpleNamespace(runner=None))
    return module


class Engine:
    """A runner and its scheduler, as far as the capture looks at them, with the hooks where SGLang would call them."""

    def __init__(self, runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.free = 40 << 30
        self.votes: list[bool] = []
        self.others_agree = True
        self.idle = True
        self.forward_ct = 0
        self.idle_sleeper: Any = SimpleNamespace(maybe_sleep=lambda: None)
        self.slept: list[bool] = []
        self.made = 0
        self.runners = runners
        prefill = SimpleNamespace(backend="breakable", bs=list(SIZES))
        self.server_args = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
        self.model_config = SimpleNamespace(context_len=2048)
        self.req_to_token_pool = SimpleNamespace()
        self.device, self.gpu_id, self.is_draft_worker = "cuda", 0, False
        self.token_to_kv_pool = SimpleNamespace(post_capture_active=False)
        self.graph_memory_usage = {"prefill": 0.0, "decode": 0.5}
        self.graph_time_usage = {"prefill": 0.0, "decode": 1.0}
        self.prefill_cuda_graph_runner: Any = None
        self.late = late_graphs.Late(lambda targets: True)
        self.world = 1
        monkeypatch.setattr(late_graphs, "time", self.clock)
        monkeypatch.setattr(adapter_graphs, "free_bytes", lambda _: self.free)
        monkeypatch.setattr(adapter_graphs, "all_ranks", self._vote)
        monkeypatch.setattr(adapter, "world", lambda: (0, self.world, None))
        monkeypatch.setattr(state.process, "shares_weights", True)
        monkeypatch.setattr(state.process, "capturing", False)

    def _vote(self, agreed: bool) -> bool:
        self.votes.append(agreed)
        return agreed and self.others_agree

    def is_fully_idle(self) -> bool:
        return self.idle

    def start(self) -> Any:
        return self.late.around_capture_prefill(self.capture_prefill_graph, model_runner=self, eager_runner=None)

    def capture_prefill_graph(self, **_: Any) -> Any:
        made = self.runners.PrefillCudaGraphRunner()
        self.made += 1
        real = made.real_capture
        made.capture = lambda: self.late.around_capture(lambda _: real(), made)
        made.capture()
        return SimpleNamespace(runner=made)

    def init_prefill_cuda_graph(self) -> None:
        answer = self.late.around_capture_prefill(self.capture_prefill_graph, model_runner=self, eager_runner=None)
        self.prefill_cuda_graph_runner = answer.runner

    def turn(self, seconds: float = 0.01) -> None:
        """One turn of an idle scheduler's loop."""
        self.late.around_on_idle(lambda _: self.slept.append(self.idle_sleeper is not None), self)
        self.clock.now += seconds

    def answer(self) -> None:
        self.forward_ct += 3


@pytest.fixture
def engine(runners: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(runners, monkeypatch)


def begun(engine: Engine) -> None:
    """Up to the first size."""
    engine.start()
    engine.answer()
    engine.turn(1.1)
    engine.turn()


def test_one_size_a_turn_after_a_quiet_second_and_all_at_once_in_use(engine: Engine) -> None:
    assert engine.start().runner is None
    assert engine.made == 0
    engine.answer()
    engine.turn(0.5)
    engine.turn(0.6)
    assert engine.made == 0
    engine.turn()  # makes the runner
    assert engine.made == 1
    captured = engine.late.prefill.backend.graphs
    for number in range(1, len(SIZES) + 1):
        assert engine.prefill_cuda_graph_runner is None
        engine.turn()
        assert sorted(captured, reverse=True) == sorted(SIZES, reverse=True)[:number]
    in_use = engine.prefill_cuda_graph_runner
    assert in_use.capture_num_tokens == SIZES
    assert set(in_use.backend.graphs) == set(SIZES)
    engine.turn(100)
    assert engine.made == 1
    assert engine.late.model_runner is None


def test_all_graphs_write_to_the_buffer_of_the_largest(engine: Engine) -> None:
    engine.start()
    engine.answer()
    for _ in range(8):
        engine.turn(1.1)
    buffers = engine.prefill_cuda_graph_runner.backend.graphs.values()
    assert [buffer == [max(SIZES)] for buffer in buffers] == [True] * len(SIZES)
    assert len({id(buffer) for buffer in buffers}) == 1
    assert "_alloc_full_buffer" not in vars(engine.prefill_cuda_graph_runner.backend)


def test_a_request_comes_between_two_sizes(engine: Engine) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    engine.turn()
    engine.turn()
    assert len(engine.late.left) == 2
    engine.answer()
    engine.turn(0.5)
    engine.turn(0.4)
    assert len(engine.late.left) == 2
    engine.turn(0.2)
    engine.turn()
    assert len(engine.late.left) == 1


def test_an_engine_that_nobody_asks_begins_later(engine: Engine) -> None:
    engine.start()
    engine.turn(late_graphs.UNASKED_SECONDS - 1)
    engine.turn(2)
    assert engine.made == 0
    engine.turn()
    assert engine.made == 1


def test_it_sleeps_while_it_waits_and_not_while_sizes_are_left(engine: Engine) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    for _ in range(len(SIZES) + 2):
        engine.turn()
    assert engine.slept == [True, *[False] * len(SIZES), True, True]


def test_all_ranks_have_to_be_idle(engine: Engine) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    engine.others_agree = False
    engine.turn()
    assert engine.votes == [True, False, True]
    assert engine.made == 0
    engine.others_agree, engine.idle = True, False
    engine.turn()
    assert engine.made == 0
    engine.idle = True
    engine.turn()
    assert engine.made == 1


@pytest.mark.parametrize(("free", "others"), [(late_graphs.ROOM_BYTES - 1, True), (1 << 40, False)])
def test_without_room_prefill_stays_eager(
    engine: Engine, free: int, others: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    engine.free = free
    votes = iter([True, others and free >= late_graphs.ROOM_BYTES])
    monkeypatch.setattr(adapter_graphs, "all_ranks", lambda agreed: agreed and next(votes))
    engine.turn()
    assert engine.made == 0
    assert engine.late.model_runner is None
    assert engine.prefill_cuda_graph_runner is None
    assert "prefill stays eager" in caplog.text
    engine.turn(100)  # asks no other rank any more


def test_what_it_took_is_accounted(engine: Engine) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    engine.turn()
    engine.free -= 3 << 30
    for _ in SIZES:
        engine.turn()
    assert engine.graph_memory_usage == {"prefill": 3.0, "decode": 0.5}
    assert engine.graph_time_usage["decode"] == 1.0


def test_neither_bars_nor_full_collections(engine: Engine) -> None:
    engine.start()
    engine.answer()
    for _ in range(8):
        engine.turn(1.1)
    assert engine.runners.bars == []
    assert engine.runners.collections == []
    assert engine.prefill_cuda_graph_runner.collecting == [False] * len(SIZES)
    assert gc.isenabled()
    with engine.runners.freeze_gc(True):  # put back
        assert engine.runners.collections == [True]


def fails_with(error: Exception) -> Callable[[Any], None]:
    def fails(_: Any) -> None:
        raise error

    return fails


def test_without_memory_an_engine_that_is_alone_goes_on(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    begun(engine)
    engine.late.prefill.backend.capture_session = fails_with(torch.OutOfMemoryError())
    engine.turn()
    assert engine.prefill_cuda_graph_runner is None
    assert engine.late.model_runner is None
    assert "prefill stays eager: the device has no memory left" in caplog.text
    assert engine.runners.synchronized == [0]


@pytest.mark.parametrize(("world", "error"), [(2, torch.OutOfMemoryError()), (1, RuntimeError("CUDA error"))])
def test_what_else_fails_ends_the_engine_and_the_next_one_captures_at_once(
    engine: Engine, world: int, error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine.late.marker = tmp_path / "warmed" / "start.capturing"
    engine.world = world
    begun(engine)
    engine.late.prefill.backend.capture_session = fails_with(error)
    with pytest.raises(type(error)):
        engine.turn()
    assert state.process.capturing  # no device fault
    assert engine.late.marker.exists()
    engine.late = late_graphs.Late(lambda _: True, engine.late.marker)
    assert engine.start().runner is not None
    assert "an earlier engine ended while it captured them" in caplog.text
    engine.late = late_graphs.Late(lambda _: True, engine.late.marker)
    assert engine.start().runner is None


def test_the_marker_is_there_only_while_it_captures(engine: Engine, tmp_path: Path) -> None:
    marker = engine.late.marker = tmp_path / "warmed" / "start.capturing"
    engine.start()
    engine.answer()
    engine.turn(1.1)
    assert not marker.exists()
    engine.turn()
    assert marker.exists()
    assert not state.process.capturing  # between two sizes a fault is the device's
    for _ in SIZES:
        engine.turn()
    assert not marker.exists()
    assert not state.process.capturing
    assert engine.prefill_cuda_graph_runner is not None


def test_one_stream_clean_buffers_and_nothing_under_way_afterwards(engine: Engine) -> None:
    begun(engine)
    for _ in SIZES:
        engine.turn()
    assert len(set(map(id, engine.runners.streams))) == 1
    assert engine.runners.reset == [0, 1, 2]
    assert engine.runners.synchronized == [1, 2, 3]


def test_another_ranks_reason_is_everybodys(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine.others_agree = False
    assert engine.start().runner is not None
    assert "before the first answer: another rank's" in caplog.text


def test_sglang_may_still_decide_against_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start()
    engine.answer()
    engine.turn(1.1)
    eager = object()
    monkeypatch.setattr(engine, "capture_prefill_graph", lambda **_: SimpleNamespace(runner=eager))
    engine.turn()
    assert engine.prefill_cuda_graph_runner is eager
    assert engine.late.model_runner is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda engine: setattr(engine.server_args, "speculative_algorithm", "EAGLE"), "speculative decoding"),
        (lambda engine: setattr(engine.server_args, "enable_dp_attention", True), "data-parallel attention"),
        (lambda engine: setattr(engine.server_args, "pp_size", 2), "pipeline parallelism"),
        (lambda engine: setattr(engine.server_args, "enable_lora", True), "LoRA"),
        (lambda engine: setattr(engine.server_args, "disaggregation_mode", "prefill"), "disaggregated"),
        (lambda engine: setattr(engine.token_to_kv_pool, "post_capture_active", True), "KV pool"),
        (lambda engine: setattr(engine.req_to_token_pool, "mamba_pool", object()), "a state for each request"),
        (lambda engine: setattr(engine.model_config, "context_len", 32), "shorter than the largest graph"),
        (lambda engine: delattr(engine, "model_config"), "AttributeError"),
        (lambda engine: setattr(state.process, "shares_weights", False), "came from disk"),
    ],
)
def test_captured_at_once_and_said_why(
    engine: Engine, change: Callable[[Engine], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    change(engine)
    assert set(engine.start().runner.backend.graphs) == set(SIZES)
    assert said in caplog.text
    engine.turn(100)
    assert engine.made == 1
    assert engine.votes == [False]


def test_switches_that_look_at_all_graphs_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_CUDA_GRAPH_DEDUP", "1")
    assert engine.start().runner is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: setattr(engine, "is_draft_worker", True),
        lambda engine: setattr(engine, "device", "cpu"),
        lambda engine: setattr(engine.server_args.cuda_graph_config.prefill, "backend", "disabled"),
        lambda engine: setattr(engine.late, "took", lambda _: False),
    ],
)
def test_what_is_none_of_its_business_is_left_alone(
    engine: Engine, change: Callable[[Engine], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    change(engine)
    assert engine.start().runner is not None
    assert caplog.text == ""


def test_a_release_that_looks_different_starts_as_ever(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    del engine.is_draft_worker
    assert engine.start().runner is not None
    assert "is_draft_worker" in caplog.text


def test_a_world_of_one_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "world", lambda: (0, 1, None))
    assert adapter_graphs.all_ranks(agreed=True)
    assert not adapter_graphs.all_ranks(agreed=False)
    assert adapter_graphs.is_alone()


def test_the_sleeper_comes_back() -> None:
    sleeper = object()
    scheduler = SimpleNamespace(idle_sleeper=sleeper)
    with adapter_graphs.awake(scheduler):
        assert scheduler.idle_sleeper is None
    assert scheduler.idle_sleeper is sleeper


class DecodeRunner:
    """SGLang's runner of decode graphs, as far as the capture looks at it."""

    def __init__(self, engine: Engine, sizes: list[int], module: Any) -> None:
        self.model_runner = engine
        self.capture_bs = list(sizes)
        self.disable_padding = False
        self.buffers = SimpleNamespace(reset_index_buffers=lambda: module.reset.append(len(self.graphs)))
        self.device_module = SimpleNamespace(synchronize=lambda: module.synchronized.append(len(self.graphs)))
        self.graphs: list[int] = []
        self.stream: object = None
        self.fails: Exception | None = None
        self.module = module
        self.late = engine.late

    def capture(self) -> None:
        self.late.around_capture_decode(lambda runner: runner.real_capture(), self)

    def real_capture(self) -> None:
        if self.fails is not None:
            raise self.fails
        with self.module.freeze_gc(True), self.module.graph_capture() as stream:
            self.stream = stream
            self.graphs += reversed(self.capture_bs)

    def size_for(self, requests: int) -> int:
        """SGLang's padding."""
        size = min(size for size in self.capture_bs if size >= requests)
        assert size in self.graphs
        return size


@pytest.fixture
def decode(engine: Engine, runners: Any, monkeypatch: pytest.MonkeyPatch) -> DecodeRunner:
    monkeypatch.setattr(DecodeRunner, "__module__", runners.__name__)
    engine.server_args.cuda_graph_config.decode = SimpleNamespace(backend="full")
    return DecodeRunner(engine, DECODE_SIZES, runners)


def test_a_few_decode_graphs_first_and_every_batch_has_one(engine: Engine, decode: DecodeRunner) -> None:
    decode.capture()
    assert decode.graphs == [64, 8, 4, 2, 1]
    assert [decode.size_for(requests) for requests in (1, 3, 8, 9, 64)] == [1, 4, 8, 64, 64]
    engine.answer()
    engine.turn(1.1)
    engine.turn()
    assert decode.graphs[5:] == [48]
    assert [decode.size_for(requests) for requests in (9, 40, 50)] == [48, 48, 64]
    for _ in DECODE_SIZES:
        engine.turn()
    assert sorted(decode.graphs) == decode.capture_bs == DECODE_SIZES
    assert engine.graph_time_usage["decode"] >= 1.0
    assert not engine.late.waits


def test_every_power_of_two_comes_first(engine: Engine, runners: Any, decode: DecodeRunner) -> None:
    """An engine that is never idle computes at most twice what a batch needs."""
    many = DecodeRunner(engine, [1, 2, 4, 8, *range(16, 257, 8)], runners)
    many.capture()
    assert many.graphs == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert all(many.size_for(requests) <= 2 * requests for requests in range(1, 257))


def test_decode_graphs_come_before_prefill_graphs(engine: Engine, decode: DecodeRunner) -> None:
    engine.start()
    decode.capture()
    engine.answer()
    engine.turn(1.1)
    for _ in range(3):
        engine.turn()
    assert not engine.late.decode.left
    assert engine.made == 0
    for _ in range(5):
        engine.turn()
    assert set(engine.prefill_cuda_graph_runner.backend.graphs) == set(SIZES)


def test_all_decode_graphs_on_one_stream_and_nothing_under_way(engine: Engine, decode: DecodeRunner) -> None:
    decode.capture()
    engine.answer()
    engine.turn(1.1)
    for _ in range(4):
        engine.turn()
    assert len(engine.runners.streams) == 4
    assert len(set(map(id, engine.runners.streams[1:]))) == 1
    assert engine.runners.reset == [5, 6, 7]
    assert engine.runners.synchronized == [6, 7, 8]


def test_another_capture_while_it_serves_is_sglangs_own(engine: Engine, decode: DecodeRunner) -> None:
    """SGLang captures anew when a request wants hidden states."""
    decode.capture()
    decode.graphs.clear()
    decode.capture()
    assert decode.graphs == [64, 8, 4, 2, 1]
    engine.answer()
    engine.turn(1.1)
    for _ in range(4):
        engine.turn()
    decode.graphs.clear()
    decode.capture()
    assert sorted(decode.graphs) == DECODE_SIZES


def test_few_sizes_are_captured_at_once(engine: Engine, runners: Any, decode: DecodeRunner) -> None:
    small = DecodeRunner(engine, [1, 2, 4], runners)
    small.capture()
    assert small.graphs == [4, 2, 1]
    assert not engine.late.waits
    assert engine.votes == []


def test_without_memory_batches_are_padded_more(
    engine: Engine, decode: DecodeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    decode.capture()
    engine.answer()
    engine.turn(1.1)
    decode.fails = torch.OutOfMemoryError()
    engine.turn()
    assert not engine.late.waits
    assert decode.capture_bs == [1, 2, 4, 8, 64]
    assert "3 decode graphs are not captured, batches are padded more: the device has no memory left" in caplog.text
    assert not state.process.capturing


def test_after_a_death_while_it_captured_everything_is_captured_at_once(
    engine: Engine, decode: DecodeRunner, runners: Any, tmp_path: Path
) -> None:
    marker = engine.late.marker = tmp_path / "warmed" / "start.capturing"
    decode.capture()
    engine.answer()
    engine.turn(1.1)
    decode.fails = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError):
        engine.turn()
    assert marker.exists()
    for prefill_too in (True, False):
        marker.touch()
        engine.late = late_graphs.Late(lambda _: True, marker)
        if prefill_too:
            assert engine.start().runner is not None
        following = DecodeRunner(engine, DECODE_SIZES, runners)
        following.capture()
        assert sorted(following.graphs) == DECODE_SIZES
        assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda engine, decode: setattr(decode, "disable_padding", True),
        lambda engine, decode: setattr(engine.server_args, "enable_torch_compile", True),
        lambda engine, decode: setattr(engine.server_args, "enable_profile_cuda_graph", True),
        lambda engine, decode: setattr(engine.server_args, "speculative_algorithm", "EAGLE"),
        lambda engine, decode: setattr(engine.server_args.cuda_graph_config.decode, "backend", "breakable"),
        lambda engine, decode: setattr(engine, "is_draft_worker", True),
        lambda engine, decode: setattr(engine.late, "took", lambda _: False),
        lambda engine, decode: setattr(engine, "others_agree", False),
        lambda engine, decode: setattr(state.process, "shares_weights", False),
        lambda engine, decode: delattr(decode, "disable_padding"),
    ],
)
def test_all_decode_graphs_at_once(
    engine: Engine, decode: DecodeRunner, change: Callable[[Engine, DecodeRunner], None]
) -> None:
    change(engine, decode)
    decode.capture()
    assert sorted(decode.graphs) == DECODE_SIZES
    assert not engine.late.waits
