"""KV memory that comes and goes, against a stand-in driver: which kinds, how pools are made, what is kept."""

from __future__ import annotations

import re
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
from weightcache.engine.kv_plan import Plan
from weightcache.engine.parked_buffers import KvBuffers, Parked, Reserving
from weightcache.errors import NoRoom, UsageError, WeightcacheError
from weightcache.memory import cuda_backed
from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaMemory

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
    monkeypatch.setattr(Parked, "memory", staticmethod(lambda device: CudaMemory(device, fake)))
    monkeypatch.setattr(CudaBacked, "tensor", lambda *_: torch.empty(0, device="meta"))
    yield fake
    for buffers in list(Parked.made):
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
    assert Parked.made == []


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("multimodal", "tokens"), [(False, 1024), (True, 8192)])
def test_a_warm_up_has_room_from_the_start(driver: FakeDriver, multimodal: bool, tokens: int) -> None:
    model = runner()
    model.model_config.is_multimodal = multimodal
    parked_kv.ParkedMemory().check(scheduler(model))
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
    assert Parked.made == []
    driver.assert_clean()


def runner(dtype: torch.dtype = torch.bfloat16, mla: bool = False, window: bool = False, **arguments: Any) -> Any:
    """As much of a ModelRunner as is asked, of a model that may be in a slot."""
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        kv_cache_dtype=dtype,
        dtype=torch.bfloat16,
        max_total_num_tokens=TOKENS,
        use_mla_backend=mla,
        is_hybrid_swa=window,
        is_hybrid_swa_compress=False,
        model_config=SimpleNamespace(hf_config="plain", is_multimodal=False),
    )


def scheduler(*runners: Any) -> Any:
    """With a target, and drafts if there are more."""
    target, *drafts = runners
    draft = SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=drafts)) if drafts else None
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=target), draft_worker=draft)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_kv, "has_states", lambda config: config.hf_config == "states")
    monkeypatch.setattr(adapter_kv, "_other_family", lambda config: "an index" if config == "sparse" else "")
    monkeypatch.setattr(adapter_kv, "replace_owner", lambda _: None)
    monkeypatch.setattr(KvBuffers, "first_tokens", 0)


def of(family: str, given: Any) -> Any:
    given.model_config.hf_config = family
    return given


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (runner(kv_cache_dtype="mxfp8"), "this quantized KV cache"),
        (runner(speculative_algorithm="NGRAM"), "this kind of speculative decoding"),
        (runner(enable_kv_cache_sharding=True), "a KV cache that is cut by pages"),
        (runner(enable_page_major_kv_layout=True), "a KV cache that is ordered by pages"),
        (runner(enable_unified_memory=True), "KV memory that is one with the memory of other states"),
        (of("sparse", runner()), "an index"),
        (of("states", runner(speculative_algorithm="EAGLE")), "speculative decoding by a model that keeps a state"),
        (runner(kv_canary="log"), "canaries in KV memory"),
        (
            runner(speculative_algorithm="EAGLE", speculative_eagle_topk=8, page_size=64),
            "a draft that guesses a tree, with pages of several tokens",
        ),
        (
            runner(torch.float8_e4m3fn, mla=True, attention_backend="fa3"),
            "latent attention (MLA) over another type of values (torch.float8_e4m3fn) by these kernels",
        ),
        (
            runner(torch.float8_e4m3fn, mla=True, attention_backend="triton", decode_attention_backend="flashinfer"),
            "latent attention (MLA) over another type of values",
        ),
    ],
)
def test_which_kv_memory_cannot_be_parked(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=f"does not work yet with {re.escape(why)}"):
        parked_kv.ParkedMemory(unproven=True).check(scheduler(given))


@pytest.mark.usefixtures("models")
def test_a_draft_of_an_unknown_kind_is_refused_with_a_sentence() -> None:
    given = scheduler(runner(speculative_algorithm="NGRAM"))
    given.draft_worker = object()  # which has no runners
    with pytest.raises(UsageError, match="does not work yet with this kind of speculative decoding"):
        parked_kv.ParkedMemory(unproven=True).check(given)


@pytest.mark.usefixtures("models")
def test_another_memory_pool_is_refused_with_a_draft_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "1")
    for given in (runner(), runner(speculative_algorithm="EAGLE")):
        with pytest.raises(UsageError, match="a memory pool of its own"):
            parked_kv.ParkedMemory(unproven=True).check(scheduler(given))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (runner(), ""),
        (runner(kv_cache_dtype="bf16", speculative_algorithm=None), ""),
        (runner(torch.float8_e4m3fn, kv_cache_dtype="fp8_e4m3"), "a quantized KV cache (torch.float8_e4m3fn)"),
        (runner(torch.float8_e5m2, kv_cache_dtype="auto"), "a quantized KV cache (torch.float8_e5m2)"),
        (runner(mla=True), "latent attention (MLA)"),
        (
            runner(torch.float8_e4m3fn, mla=True, attention_backend="triton"),
            "a quantized KV cache (torch.float8_e4m3fn)",
        ),
        (runner(speculative_algorithm="EAGLE", speculative_eagle_topk=8, page_size=1), "speculative decoding"),
        (runner(window=True), "layers with a sliding window"),
        (runner(speculative_algorithm="EAGLE3"), "speculative decoding"),
        (of("states", runner()), "layers that keep a state for each request"),
    ],
)
def test_what_no_run_has_shown_has_to_be_asked_for(given: Any, what: str) -> None:
    parked_kv.ParkedMemory(unproven=True).check(scheduler(given))
    if not what:
        parked_kv.ParkedMemory().check(scheduler(given))
        return
    with pytest.raises(UsageError, match=re.escape(f"yet with {what}: unproven = true in [standby] tries it")):
        parked_kv.ParkedMemory().check(scheduler(given))


class MHATokenToKVPool:
    """By its name one that is known."""


class OtherPool:
    """Nobody knows how it keeps its memory."""


@pytest.mark.usefixtures("models")
def test_pools_that_were_made_in_another_way_are_refused(driver: FakeDriver) -> None:
    memory, model = parked_kv.ParkedMemory(), runner()
    model.token_to_kv_pool = MHATokenToKVPool()
    draft = runner()
    draft.token_to_kv_pool = MHATokenToKVPool()
    memory.check(scheduler(model, draft))
    with pytest.raises(WeightcacheError, match="made no KV memory that can be given back"):
        memory.prove()
    buffers()
    memory.prove()
    draft.token_to_kv_pool = OtherPool()
    with pytest.raises(WeightcacheError, match="keeps KV memory in a OtherPool"):
        memory.prove()
    draft.token_to_kv_pool = MHATokenToKVPool()
    model.token_to_kv_pool = OtherPool()
    with pytest.raises(WeightcacheError, match="keeps KV memory in a OtherPool"):
        memory.prove()
    model.token_to_kv_pool = MHATokenToKVPool()
    model.token_to_kv_pool.swa_kv_pool = OtherPool()  # type: ignore[attr-defined]
    with pytest.raises(WeightcacheError, match="keeps KV memory in a OtherPool"):
        memory.prove()


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(adapter, "world", lambda: (0, 1, None))
    monkeypatch.setattr(adapter_kv, "plan_key", lambda _: tuple(KEY))
    return parked_kv.hooks(Plan(tmp_path / "plan", tmp_path / "lock", 300), lambda _: None)


def test_the_hooks_do_what_sglang_asks_for(hooks: dict[str, Any]) -> None:
    assert hooks[adapter_kv.PROFILE_BYTES](lambda *_: 1000, SimpleNamespace(mambaish_config=None), 5) == 700
    for is_draft in (False, True):
        assert hooks[adapter_kv.IS_BACKED_LATER](lambda **_: False, server_args=None, is_draft_worker=is_draft)
    told: list[object] = []
    pool = SimpleNamespace(finalize_backing=told.append)
    runner = SimpleNamespace(token_to_kv_pool=pool, memory_pool_config="as planned")
    assert hooks[adapter_kv.BACK_NOW](lambda *_: pytest.fail("SGLang's own sizing"), runner) is None
    assert told == ["as planned"]


def test_what_is_planned_is_shared_with_states(hooks: dict[str, Any]) -> None:
    share = hooks[adapter_kv.SHARE_WITH_STATES]
    asked: list[float] = []

    def shared(_: Any, gigabytes: float) -> float:
        asked.append(gigabytes)
        return gigabytes / 4

    def profiled(free: int) -> Any:
        """As SGLang's: what is left of the free memory after states had their share."""
        return lambda configurator, *_: int(share(shared, configurator, free / 2**30) * 2**30)

    states = SimpleNamespace(mambaish_config="some")
    assert hooks[adapter_kv.PROFILE_BYTES](profiled(1000), states, 5) == 700 // 4
    assert hooks[adapter_kv.PROFILE_BYTES](profiled(5), states, 5) == 700 // 4  # the other slot, beside an active one
    assert asked == [700 / 2**30] * 2


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> list[torch.Tensor]:
    """What Reserving made, without a GPU; torch.zeros of it fails here if it is not stood in for."""
    made: list[torch.Tensor] = []

    def tensor(_: Any, __: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(shape, dtype=dtype, device="meta"))
        return made[-1]

    monkeypatch.setattr(CudaBacked, "tensor", tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver.free = 1000 * GRANULARITY
    return made


def parts(driver: FakeDriver) -> list[tuple[int, int]]:
    """Where memory is behind the last range, in granules."""
    base = list(driver.reserved)[-1]
    mapped = [(at - base, size) for at, (size, _) in sorted(driver.mapped.items()) if at >= base]
    return [(at // GRANULARITY, size // GRANULARITY) for at, size in mapped]


def test_a_pool_of_zeros_keeps_its_first_rows(driver: FakeDriver, on_meta: list[torch.Tensor]) -> None:
    with Reserving(rows=GRANULARITY // 256 + 1, dim=0):
        made = torch.zeros((10 * GRANULARITY // 256, 1, 128), dtype=torch.bfloat16, device="cuda:0")
        same = torch.zeros(2, 3)
    assert made is on_meta[0]
    assert (made.shape, made.dtype) == ((10 * GRANULARITY // 256, 1, 128), torch.bfloat16)
    assert (same.device.type, len(on_meta)) == ("cpu", 1)
    assert parts(driver) == [(0, 2)]
    assert parked_kv.take(1) == 10 * GRANULARITY
    assert parts(driver) == [(0, 2), (2, 8)]
    assert {address for address, _ in driver.cleared} == set(driver.mapped)
    assert parked_kv.give_back() == 2 * GRANULARITY


def test_states_of_each_layer_keep_their_first_slots(driver: FakeDriver, on_meta: list[torch.Tensor]) -> None:
    with Reserving(rows=2, dim=1):
        torch.zeros(size=(3, 8, GRANULARITY // 4), dtype=torch.float32, device="cuda")
    assert on_meta[0].shape == (3, 8, GRANULARITY // 4)
    assert parts(driver) == [(0, 2), (8, 2), (16, 2)]
    assert parked_kv.take(1) == 24 * GRANULARITY
    assert parked_kv.give_back() == 6 * GRANULARITY
    assert parts(driver) == [(0, 2), (8, 2), (16, 2)]


def test_what_would_be_kept_as_a_whole_is_made_as_usual(driver: FakeDriver, on_meta: list[torch.Tensor]) -> None:
    for shape, rows, dim in (
        ((4, 8, 16), 2, 1),  # all in one granule
        ((10 * GRANULARITY,), 2, 1),  # no slots
        ((3, 0, 16), 2, 1),
        ((10, GRANULARITY), 10, 0),
    ):
        with Reserving(rows, dim), pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|cuda"):
            torch.zeros(shape, device="cuda")
    assert (on_meta, Parked.made) == ([], [])


def test_sglangs_pools_are_made_while_zeros_are_reserved(
    hooks: dict[str, Any], driver: FakeDriver, on_meta: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvBuffers, "first_tokens", 1024)
    pool = SimpleNamespace(page_size=64, buffers=[])

    def create(pool: Any) -> None:
        pool.buffers = [torch.zeros((64 * GRANULARITY // 2048, 1, 1024), dtype=torch.bfloat16, device="cuda")] * 2

    hooks[adapter_kv.MAKE_LATENT](create, pool)
    assert pool.buffers == [on_meta[0]] * 2
    assert parts(driver) == [(0, 2)]  # 1088 tokens of 2 KiB

    def make(pool: Any, *, size: int) -> None:
        pool.states = torch.zeros((2, size + 1, GRANULARITY // 4), dtype=torch.float32, device="cuda")

    hooks[adapter_kv.MAKE_STATES](make, pool, size=99)
    assert pool.states is on_meta[-1]
    assert parts(driver) == [(0, 17), (100, 17)]
    assert torch.zeros(1).device.type == "cpu"  # nobody stands in for anything any more


@pytest.mark.usefixtures("models")
def test_pools_for_more_than_was_planned_are_refused(driver: FakeDriver, tmp_path: Path) -> None:
    memory, model, draft = parked_kv.ParkedMemory(unproven=True), runner(speculative_algorithm="STANDALONE"), runner()
    model.token_to_kv_pool = draft.token_to_kv_pool = MHATokenToKVPool()
    memory.check(scheduler(model, draft))
    target = 2 * (TOKENS + 1) * ROW
    plan = Plan(tmp_path / "plan", tmp_path / "lock", kv_bytes=target + 4 * GRANULARITY)
    hooks = parked_kv.hooks(plan, memory.budgeted)
    configurator = SimpleNamespace(mambaish_config=None)
    assert hooks[adapter_kv.PROFILE_BYTES](lambda *_: pytest.fail("measured"), configurator, 5) == plan.kv_bytes
    buffers()
    memory.prove()
    buffers()  # a draft of the same size, which SGLang took for a smaller one
    with pytest.raises(
        WeightcacheError, match=r"has 0.1 GB, and 0.0 GB are planned.*--max-total-tokens (\d+) would fit"
    ) as why:
        memory.prove()
    found = re.search(r"tokens (\d+)", str(why.value))
    assert found
    assert int(found[1]) == int(TOKENS * plan.kv_bytes / (2 * target))


@pytest.mark.usefixtures("models")
def test_how_much_was_given_back_is_said(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    buffers().finalize(TOKENS)
    memory = parked_kv.ParkedMemory()
    memory.map(1)
    with caplog.at_level("INFO"):
        memory.unmap()
    assert "0.029 GB of KV memory were given back, 0.004 GB stay" in caplog.text
