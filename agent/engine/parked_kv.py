"""The KV memory of an engine in a slot: addresses from its start on, memory only while it is the active engine.

Graphs are captured and warmed up on the first tokens of the pools, which keep their memory. The rest is taken when this
rank comes to own its KV memory, and given back when it retires.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from weightcache.engine import adapter_kv as sglang, adapter_slot
from weightcache.engine.kv_plan import Plan
from weightcache.engine.parked_buffers import KvBuffers, Parked, Reserving
from weightcache.engine.turns import short_turns
from weightcache.errors import UsageError, WeightcacheError

logger = logging.getLogger(__name__)

MOST_OVER = 0.02
"""Of what is planned: SGLang rounds pages up, and the driver what is behind each buffer."""


class ParkedMemory:
    """The KV memory of this process as a slot's rank knows it (weightcache.engine.slot_rank.Memory).

    ``unproven``: whether kinds of KV memory are taken that no run on a GPU has shown yet.
    """

    def __init__(self, unproven: bool = False) -> None:
        self._unproven = unproven
        self._runners: list[Any] = []
        self._budget = 0

    def check(self, scheduler: Any) -> None:
        """Refuse what cannot be parked yet; from now on pools are made of parked buffers. Raises WeightcacheError."""
        self._runners.clear()
        for runner in sglang.runners(scheduler):  # a draft is looked for only if the target may have one
            self._runners.append(runner)
            if why := sglang.why_not(runner):
                raise UsageError(f"an engine in a slot has to park its KV memory, which does not work yet with {why}")
            if (what := sglang.unproven(runner)) and not self._unproven:
                raise UsageError(
                    "an engine in a slot has to park its KV memory, which no run on a GPU has shown yet with "
                    f"{what}: unproven = true in [standby] tries it"
                )
        KvBuffers.first_tokens = adapter_slot.first_tokens(self._runners[0].model_config)
        sglang.replace_owner(KvBuffers)

    def budgeted(self, size: int) -> None:
        """Note the bytes that pools are made for."""
        self._budget = size

    def prove(self) -> None:
        """Refuse an engine whose pools were made in another way, or for more than was planned.

        Raises WeightcacheError.
        """
        if not Parked.made:
            raise WeightcacheError("this engine made no KV memory that can be given back, and may not be in a slot")
        for strange in filter(None, map(sglang.strange_pools, self._runners)):
            raise WeightcacheError(
                f"this engine keeps KV memory in a {strange}, of which it is not known how to give it back, "
                "and may not be in a slot"
            )
        size = sum(buffers.whole_bytes for buffers in Parked.made)
        if self._budget and size > self._budget * (1 + MOST_OVER) + sum(buffers.slack_bytes for buffers in Parked.made):
            fits = int(sglang.tokens(self._runners[0]) * self._budget / size)
            raise WeightcacheError(
                f"the KV memory of this engine has {size / 1e9:.1f} GB, and {self._budget / 1e9:.1f} GB are planned "
                f"for it (SGLang counts that of a draft as its target's): --max-total-tokens {fits} would fit"
            )

    def map(self, seconds: float) -> None:
        """Have all of it within ``seconds``. Raises a WeightcacheError."""
        take(seconds)

    def unmap(self) -> None:
        """Give it back, but for what is kept. Raises a WeightcacheError."""
        before = sum(buffers.backed_bytes for buffers in Parked.made)
        kept = give_back()
        logger.info(
            "weightcache: %.3f GB of KV memory were given back, %.3f GB stay", (before - kept) / 1e9, kept / 1e9
        )


def take(seconds: float) -> int:
    """Have memory behind all pools of this process within ``seconds``; bytes. Raises a WeightcacheError."""
    begin = time.monotonic()
    with short_turns():
        waited = sum(buffers.take(begin + seconds) for buffers in Parked.made)
    found = sum(buffers.backed_bytes for buffers in Parked.made)
    took = time.monotonic() - begin
    text = "weightcache: %.2f GB of KV memory are there after %.3f s, of which %.3f s until they were free"
    logger.info(text, found / 1e9, took, waited)
    return found


def give_back() -> int:
    """Give back what ``take`` took; the bytes that stay. Raises a WeightcacheError."""
    with short_turns():
        for buffers in Parked.made:
            buffers.give_back()
    return sum(buffers.backed_bytes for buffers in Parked.made)


def hooks(plan: Plan, budgeted: Callable[[int], None]) -> dict[str, Callable[..., Any]]:
    """What is hooked in a scheduler of an engine in a slot, on a GPU. ``budgeted`` is told the bytes of its pools."""

    def budget(configurator: Any, measure: Callable[[], int]) -> int:
        size = plan.budget(configurator, measure)
        budgeted(size)
        return size

    def profile_bytes(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
        if sglang.shares_with_states(configurator):
            return original(configurator, *args, **kwargs)  # asks share_with_states
        return budget(configurator, lambda: original(configurator, *args, **kwargs))

    def share_with_states(original: Callable[..., float], configurator: Any, gigabytes: float) -> float:
        return original(configurator, budget(configurator, lambda: int(gigabytes * 2**30)) / 2**30)

    def is_backed_later(_original: Callable[..., bool], *_args: Any, **_kwargs: Any) -> bool:
        return True

    def back_now(_original: Callable[..., Any], model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
        sglang.back_as_planned(model_runner)

    def make_latent(original: Callable[..., None], pool: Any) -> None:
        with Reserving(KvBuffers.first_tokens + pool.page_size, dim=0):
            original(pool)

    def make_states(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
        # The slot before the first one is for what has no place.
        with Reserving(adapter_slot.FIRST_STATES + 1, dim=1):
            original(pool, *args, **kwargs)

    return {
        sglang.PROFILE_BYTES: profile_bytes,
        sglang.SHARE_WITH_STATES: share_with_states,
        sglang.IS_BACKED_LATER: is_backed_later,
        sglang.BACK_NOW: back_now,
        sglang.MAKE_LATENT: make_latent,
        sglang.MAKE_STATES: make_states,
    }
