"""The KV memory of an engine in a slot: addresses from its start on, memory only while it is the active engine.

Graphs are captured and warmed up on the first tokens of the pool, which keep their memory. The rest is taken when this
rank comes to own its KV memory, and given back when it retires. How much that will be is planned once for both slots of
an engine, by the first one that starts: a standby could not measure it beside an active engine.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weightcache.engine import adapter, adapter_kv as sglang, adapter_slot
from weightcache.engine.turns import short_turns
from weightcache.errors import UsageError, WeightcacheError
from weightcache.memory.cuda_backed import CudaBacked
from weightcache.memory.cuda_vmm import CudaMemory
from weightcache.standby import files
from weightcache.standby.locks import ByteLock, is_taken

logger = logging.getLogger(__name__)

PLAN_BYTE = 1 << 20
"""Of the lock file: who measures."""
MEASURE_SECONDS = 300.0
POLL_SECONDS = 0.1
_ENDLESS, _ACTIVE = -1, -2
_PROBLEMS = {
    _ENDLESS: "another engine of this name measures its KV memory, and does not come to an end",
    _ACTIVE: "there is no plan of KV memory, and none can be measured beside an active engine of this name: "
    "stop that one, or set kv_gigabytes",
}
"""In place of bytes, what the first rank says to all."""


class KvBuffers:
    """The buffers of one KV pool; takes the place of SGLang's KvVmmBufferOwner, and has its six members.

    ``buffer_descs`` say shape and spans of each buffer (sglang.srt.mem_cache.memory_pool.KvBufferDesc).
    """

    made: list[KvBuffers] = []  # noqa: RUF012  those of this process
    memory: Callable[[int], CudaMemory] = CudaMemory
    first_tokens = 0
    """How many have memory all the time, at least."""

    def __init__(
        self,
        *,
        device: str,
        device_id: int,
        store_dtype: torch.dtype,
        page_size: int,
        reserved_num_tokens: int,
        buffer_descs: Sequence[Any],
    ) -> None:
        self._descs, self._page, self._reserved = list(buffer_descs), page_size, reserved_num_tokens
        spans = [desc.reserved_span_bytes(store_dtype.itemsize) for desc in self._descs]
        memory = KvBuffers.memory(device_id)
        self._backed = CudaBacked(memory, spans)
        # The page before the first token is for what has no place.
        first = min(KvBuffers.first_tokens + page_size, reserved_num_tokens)
        self._first = [max(memory.granularity, desc.prefix_span_bytes(first, page_size)) for desc in self._descs]
        self._final: list[int] = []
        try:
            self._backed.back(self._first)
            self.tensors = [
                self._backed.tensor(index, desc.shape, store_dtype) for index, desc in enumerate(self._descs)
            ]
        except BaseException:
            self._backed.close()
            raise
        KvBuffers.made.append(self)

    def ensure_prefix(self, num_tokens: int) -> None:
        """Have memory for the first tokens. Raises ValueError for more than fit the first piece."""
        spans = [desc.prefix_span_bytes(num_tokens, self._page) for desc in self._descs]
        if any(span > first for span, first in zip(spans, self._first, strict=True)):
            raise ValueError(f"{num_tokens} tokens are asked for before the engine owns its KV memory")

    def finalize(self, final_num_tokens: int) -> None:
        """Note how many tokens the pool is going to have; their memory comes with ``take``."""
        if not self._page <= final_num_tokens <= self._reserved:
            raise ValueError(f"{final_num_tokens} tokens in a pool of {self._reserved}")
        self._final = [desc.final_span_bytes(final_num_tokens, self._page) for desc in self._descs]

    @property
    def backed_bytes(self) -> int:
        """Bytes of memory behind the buffers now."""
        return self._backed.backed

    def take(self, deadline: float) -> float:
        """Have memory for all tokens before ``deadline`` (time.monotonic()); the seconds that this waited for some.

        Raises NoRoom or DeviceUnavailable.
        """
        return self._backed.back(self._final, deadline)

    def give_back(self) -> None:
        """Give back all memory but that of the first tokens. Raises DeviceUnavailable."""
        self._backed.give_back(self._first)

    def close(self) -> None:
        """Give back everything; the tensors must not be used any more."""
        self.tensors = []
        self._backed.close()
        if self in KvBuffers.made:
            KvBuffers.made.remove(self)


class ParkedMemory:
    """The KV memory of this process as a slot's rank knows it (weightcache.engine.slot_rank.Memory)."""

    def check(self, model_runner: Any) -> None:
        """Refuse what cannot be parked yet; from now on pools are made of KvBuffers. Raises WeightcacheError."""
        if why := sglang.why_not(model_runner):
            raise UsageError(f"an engine in a slot has to park its KV memory, which does not work yet with {why}")
        KvBuffers.first_tokens = adapter_slot.first_tokens(model_runner.model_config)
        sglang.replace_owner(KvBuffers)

    def prove(self) -> None:
        """Refuse an engine that made its pools in another way. Raises WeightcacheError."""
        if not KvBuffers.made:
            raise WeightcacheError("this engine made no KV memory that can be given back, and may not be in a slot")

    def map(self, seconds: float) -> None:
        """Have all of it within ``seconds``. Raises a WeightcacheError."""
        take(seconds)

    def unmap(self) -> None:
        """Give it back, but for the first tokens. Raises a WeightcacheError."""
        give_back()


def take(seconds: float) -> int:
    """Have memory behind all pools of this process within ``seconds``; bytes. Raises a WeightcacheError."""
    begin = time.monotonic()
    with short_turns():
        waited = sum(buffers.take(begin + seconds) for buffers in KvBuffers.made)
    found = sum(buffers.backed_bytes for buffers in KvBuffers.made)
    took = time.monotonic() - begin
    text = "weightcache: %.2f GB of KV memory are there after %.3f s, of which %.3f s until they were free"
    logger.info(text, found / 1e9, took, waited)
    return found


def give_back() -> int:
    """Give back what ``take`` took; the bytes that stay. Raises a WeightcacheError."""
    with short_turns():
        for buffers in KvBuffers.made:
            buffers.give_back()
    return sum(buffers.backed_bytes for buffers in KvBuffers.made)


def hooks(plan: Path, lock: Path, reserve_bytes: int, kv_bytes: int = 0) -> dict[str, Callable[..., Any]]:
    """What is hooked in a scheduler of an engine in a slot, on a GPU.

    ``plan`` is the file in which the slots of an engine agree on the bytes of their KV pool; ``reserve_bytes`` are left
    free for the other slot. With ``kv_bytes`` there is nothing to measure and to agree on.
    """

    def profile_bytes(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
        if kv_bytes:
            return kv_bytes
        key = [*sglang.plan_key(configurator), f"reserve_bytes={reserve_bytes}"]
        return planned(plan, lock, key, lambda: original(configurator, *args, **kwargs) - reserve_bytes)

    def is_backed_later(_original: Callable[..., bool], *_args: Any, **kwargs: Any) -> bool:
        return not kwargs.get("is_draft_worker")

    def back_now(_original: Callable[..., Any], model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
        sglang.back_as_planned(model_runner)

    return {
        sglang.PROFILE_BYTES: profile_bytes,
        sglang.IS_BACKED_LATER: is_backed_later,
        sglang.BACK_NOW: back_now,
    }


def planned(plan: Path, lock: Path, key: list[str], measure: Callable[[], int]) -> int:
    """The bytes of this engine's KV pool: as planned, or measured now and written to ``plan``; the same on all ranks.

    Nothing is measured beside an active engine, since what it leaves is not what there is: a plan for other arguments
    counts as long as there is one, and without a plan this engine does not start. Raises WeightcacheError.
    """
    first = adapter.world()[0] == 0
    turn = ByteLock(lock, PLAN_BYTE) if first else None
    try:
        known = _known(plan, lock, key, turn) if turn else 0
        # What the first rank found is what all go by: measuring is a collective.
        if (known := sglang.from_first_rank(known)) in _PROBLEMS:
            raise WeightcacheError(_PROBLEMS[known])
        if known:
            return known
        found = measure()
        # Asked again: one that was parked may have taken its memory meanwhile.
        if sglang.from_first_rank(int(first and is_taken(lock, 0))):
            raise WeightcacheError(_PROBLEMS[_ACTIVE])
        if found <= 0:
            raise WeightcacheError("no GPU memory is left for KV memory beside what a standby needs")
        if first:
            files.replace(plan, json.dumps({"key": key, "bytes": found}))
            logger.info("weightcache: the KV memory of both slots is planned with %.2f GB", found / 1e9)
        return found
    finally:
        if turn:
            turn.close()


def _known(plan: Path, lock: Path, key: list[str], turn: ByteLock) -> int:
    """The bytes of a plan that counts, 0 if they have to be measured now, or one of _PROBLEMS."""
    deadline = time.monotonic() + MEASURE_SECONDS
    while not turn.try_take():
        if time.monotonic() > deadline:
            return _ENDLESS
        time.sleep(POLL_SECONDS)
    found, size = _read(plan)
    if size and found == key:
        return size
    if is_taken(lock, 0):
        return size or _ACTIVE
    return 0


def _read(plan: Path) -> tuple[object, int]:
    """What the plan is for, and its bytes: 0 if there is none that makes sense."""
    try:
        body = json.loads(files.read(plan))
        found, size = body["key"], body["bytes"]
    except (OSError, ValueError, TypeError, KeyError, WeightcacheError):
        return None, 0
    good = isinstance(size, int) and not isinstance(size, bool) and size > 0
    return found, size if good else 0
