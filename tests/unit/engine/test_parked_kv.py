"""KV buffers whose memory comes and goes, against a stand-in driver, and the plan that both slots go by."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.memory.fake_driver import GRANULARITY, FakeDriver
from weightcache.engine import adapter, adapter_kv, parked_kv
from weightcache.engine.parked_kv import KvBuffers
from weightcache.errors import NoRoom, WeightcacheError
from weightcache.memory import cuda_backed
from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaMemory
from weightcache.standby.locks import ByteLock

ROW = 4096
"""Bytes of a token in one buffer: 512 tokens fit the first piece of memory."""
TOKENS = 4095
KEY = ["model_path=m"]


class Desc:
    """As sglang.srt.mem_cache.memory_pool.KvBufferDesc, with one token a row."""

    def __init__(self, rows: int) -> None:
        self.shape = (rows, ROW // 2)

    def reserved_span_bytes(self, itemsize: int) -> int:
        return self.shape[0] * self.shape[1] * itemsize

    def prefix_span_bytes(self, num_tokens: int, page_size: int) -> int:
        return num_tokens * ROW

    def final_span_bytes(self, num_tokens: int, page_size: int) -> int:
        return (num_tokens + page_size) * ROW


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(KvBuffers, "memory", staticmethod(lambda device: CudaMemory(device, fake)))
    monkeypatch.setattr(CudaBacked, "tensor", lambda *_: torch.empty(0, device="meta"))
    yield fake
    for buffers in list(KvBuffers.made):
        buffers.close()


def buffers(layers: int = 1, rows: int = TOKENS + 1) -> KvBuffers:
    return KvBuffers(
        device="cuda:0",
        device_id=0,
        store_dtype=torch.bfloat16,
        page_size=1,
        reserved_num_tokens=rows - 1,
        buffer_descs=[Desc(rows) for _ in range(2 * layers)],
    )


def test_memory_for_all_tokens_only_while_it_is_owned(driver: FakeDriver) -> None:
    free = driver.free
    made = buffers()
    assert made.backed_bytes == 2 * GRANULARITY == free - driver.free
    made.ensure_prefix(512)
    made.finalize(TOKENS)
    assert made.backed_bytes == 2 * GRANULARITY
    assert parked_kv.take(1) == 2 * (TOKENS + 1) * ROW == free - driver.free
    assert parked_kv.give_back() == 2 * GRANULARITY == free - driver.free
    assert parked_kv.take(1) == 2 * (TOKENS + 1) * ROW
    made.close()
    assert driver.free == free
    assert KvBuffers.made == []


@pytest.mark.parametrize(("multimodal", "tokens"), [(False, 1024), (True, 8192)])
def test_a_warm_up_has_room_from_the_start(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, multimodal: bool, tokens: int
) -> None:
    monkeypatch.setattr(adapter_kv, "why_not", lambda _: "")
    monkeypatch.setattr(adapter_kv, "replace_owner", lambda _: None)
    monkeypatch.setattr(KvBuffers, "first_tokens", 0)
    model: Any = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=multimodal))
    parked_kv.ParkedMemory().check(model)
    made = buffers(rows=20_000)
    assert tokens * ROW < made.backed_bytes / 2 <= (tokens + 1) * ROW + GRANULARITY
    made.ensure_prefix(tokens + 1)
    with pytest.raises(ValueError, match="before the engine owns"):
        made.ensure_prefix(tokens + 2)
    backed = made.backed_bytes
    made.finalize(19_000)
    driver.free = 100 * GRANULARITY
    assert parked_kv.take(1) > backed
    assert parked_kv.give_back() == backed


def test_a_pool_of_few_tokens_has_memory_for_all(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvBuffers, "first_tokens", 8192)
    made = buffers()
    made.finalize(TOKENS)
    before = made.backed_bytes
    assert before >= 2 * TOKENS * ROW
    assert parked_kv.take(1) - before < 2 * GRANULARITY + 1
    assert parked_kv.give_back() >= before


def test_more_tokens_than_have_memory_are_refused(driver: FakeDriver) -> None:
    made = buffers()
    with pytest.raises(ValueError, match="before the engine owns"):
        made.ensure_prefix(513)
    for tokens in (0, TOKENS + 1):
        with pytest.raises(ValueError, match="in a pool of"):
            made.finalize(tokens)


def test_memory_that_is_not_free_yet_is_waited_for(driver: FakeDriver) -> None:
    made = buffers()
    made.finalize(TOKENS)
    taken, driver.free = driver.free, GRANULARITY
    with pytest.raises(NoRoom):
        parked_kv.take(0.02)
    assert made.backed_bytes == 2 * GRANULARITY

    def died() -> None:
        time.sleep(0.05)
        driver.free = taken

    thread = threading.Thread(target=died)
    thread.start()
    assert parked_kv.take(20) == 2 * (TOKENS + 1) * ROW
    thread.join(5)


def test_an_event_loop_that_never_waits_does_not_hold_it_up(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_backed, "PIECE", GRANULARITY)
    made = buffers(layers=8, rows=16 * GRANULARITY // ROW)
    made.finalize(16 * GRANULARITY // ROW - 1)
    driver.free = 1000 * GRANULARITY
    for name in ("cuMemCreate", "cuMemUnmap"):
        call = getattr(driver, name)
        # As the real driver's calls, it gives the interpreter away and asks for it again.
        monkeypatch.setattr(driver, name, lambda *args, call=call: (time.sleep(1e-5), call(*args))[1])
    stop = threading.Event()

    def never_waits() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=never_waits)
    thread.start()
    try:
        before, begin = sys.getswitchinterval(), time.monotonic()
        parked_kv.take(60)
        parked_kv.give_back()
        took = time.monotonic() - begin
    finally:
        stop.set()
        thread.join()
    calls = driver.calls.count("cuMemCreate") + driver.calls.count("cuMemUnmap")
    assert calls > 400
    assert took < calls * before / 2
    assert sys.getswitchinterval() == before


def test_without_room_for_the_first_tokens_nothing_is_left(driver: FakeDriver) -> None:
    driver.free = GRANULARITY
    with pytest.raises(NoRoom):
        buffers()
    assert KvBuffers.made == []
    driver.assert_clean()


def test_pools_that_were_made_in_another_way_are_refused(driver: FakeDriver) -> None:
    memory = parked_kv.ParkedMemory()
    with pytest.raises(WeightcacheError, match="made no KV memory that can be given back"):
        memory.prove()
    buffers()
    memory.prove()


def runner(dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Any:
    """As much of a ModelRunner as is asked, of a model that may be in a slot."""
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments), kv_cache_dtype=dtype, use_mla_backend=False, is_hybrid_swa=False
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (runner(), ""),
        (runner(kv_cache_dtype="bf16"), ""),
        (runner(kv_cache_dtype="fp8_e4m3"), "a quantized KV cache"),
        (runner(torch.float8_e4m3fn, kv_cache_dtype="auto"), "a quantized KV cache (torch.float8_e4m3fn)"),
        (runner(enable_kv_cache_sharding=True), "a KV cache that is cut by pages"),
        (runner(enable_unified_memory=True), "KV memory that is one with the memory of other states"),
    ],
)
def test_which_kv_memory_cannot_be_parked(monkeypatch: pytest.MonkeyPatch, given: Any, why: str) -> None:
    monkeypatch.setattr(adapter_kv, "_has_state", lambda _: False)
    assert adapter_kv.why_not(given) == why


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(adapter, "world", lambda: (0, 1, None))
    return tmp_path / "engine.plan", tmp_path / "engine.lock"


def measured(size: int, calls: list[int]) -> Any:
    def measure() -> int:
        calls.append(size)
        return size

    return measure


def test_the_first_engine_measures_and_the_others_go_by_it(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    assert parked_kv.planned(*paths, KEY, measured(1000, calls)) == 1000
    assert parked_kv.planned(*paths, KEY, measured(5, calls)) == 1000
    assert calls == [1000]


def test_other_arguments_are_measured_unless_there_is_an_active_engine(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    parked_kv.planned(*paths, KEY, measured(1000, calls))
    active = ByteLock(paths[1], 0)
    active.take()
    assert parked_kv.planned(*paths, ["model_path=other"], measured(5, calls)) == 1000
    active.close()
    assert parked_kv.planned(*paths, ["model_path=other"], measured(2000, calls)) == 2000
    assert calls == [1000, 2000]


def test_nothing_is_measured_beside_an_active_engine(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    active = ByteLock(paths[1], 0)
    active.take()
    with pytest.raises(WeightcacheError, match="stop that one, or set kv_gigabytes"):
        parked_kv.planned(*paths, KEY, measured(5, calls))
    active.close()
    assert calls == []


def test_what_was_measured_while_an_engine_became_active_is_no_plan(paths: tuple[Path, Path]) -> None:
    active = ByteLock(paths[1], 0)

    def measure() -> int:
        active.take()
        return 5

    with pytest.raises(WeightcacheError, match="beside an active engine"):
        parked_kv.planned(*paths, KEY, measure)
    active.close()
    assert not paths[0].exists()


def test_another_reserve_or_gpu_is_another_plan(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    configurator = SimpleNamespace(server_args=SimpleNamespace(model_path="m"), gpu_id=3)

    def planned(reserve: int, free: int) -> Any:
        return parked_kv.hooks(*paths, reserve)[adapter_kv.PROFILE_BYTES](lambda *_: free, configurator, 5)

    assert [planned(300, 1000), planned(300, 2000), planned(400, 1000)] == [700, 700, 600]
    device.total_memory = 80 << 30
    assert planned(400, 800) == 400


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"key": 1}', '{"key": ["model_path=m"], "bytes": true}', '{"key": ["model_path=m"], "bytes": -1}'],
)
def test_a_plan_that_makes_no_sense_is_none(paths: tuple[Path, Path], text: str) -> None:
    paths[0].write_text(text)
    assert parked_kv.planned(*paths, KEY, measured(7, [])) == 7
    assert json.loads(paths[0].read_text()) == {"key": KEY, "bytes": 7}


def test_nothing_left_for_kv_memory_is_said(paths: tuple[Path, Path]) -> None:
    with pytest.raises(WeightcacheError, match="no GPU memory is left for KV memory"):
        parked_kv.planned(*paths, KEY, lambda: -3)
    assert not paths[0].exists()


def test_somebody_who_measures_without_an_end(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_kv, "MEASURE_SECONDS", 0.01)
    other = ByteLock(paths[1], parked_kv.PLAN_BYTE)
    other.take()
    with pytest.raises(WeightcacheError, match="does not come to an end"):
        parked_kv.planned(*paths, KEY, measured(7, []))
    other.close()


def test_other_ranks_go_by_the_first_one(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "world", lambda: (1, 2, None))
    told: list[int] = []

    def first(value: int) -> int:
        told.append(value)
        return 1234

    monkeypatch.setattr(adapter_kv, "from_first_rank", first)
    assert parked_kv.planned(*paths, KEY, measured(7, [])) == 1234
    monkeypatch.setattr(adapter_kv, "from_first_rank", lambda _: 0)
    assert parked_kv.planned(*paths, KEY, measured(7, [])) == 7
    assert not paths[0].exists()
    assert told == [0]
    answers = iter((0, 1))
    monkeypatch.setattr(adapter_kv, "from_first_rank", lambda _: next(answers))
    with pytest.raises(WeightcacheError, match="beside an active engine"):
        parked_kv.planned(*paths, KEY, measured(7, []))


def test_the_hooks_do_what_sglang_asks_for(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_kv, "plan_key", lambda _: tuple(KEY))
    hooks = parked_kv.hooks(*paths, 300)
    assert hooks[adapter_kv.PROFILE_BYTES](lambda *_: 1000, object(), 5) == 700
    backed_later = hooks[adapter_kv.IS_BACKED_LATER]
    assert backed_later(lambda **_: False, server_args=None, is_draft_worker=False)
    assert not backed_later(lambda **_: True, server_args=None, is_draft_worker=True)
    told: list[object] = []
    pool = SimpleNamespace(finalize_backing=told.append)
    runner = SimpleNamespace(token_to_kv_pool=pool, memory_pool_config="as planned")
    assert hooks[adapter_kv.BACK_NOW](lambda *_: pytest.fail("SGLang's own sizing"), runner) is None
    assert told == ["as planned"]
