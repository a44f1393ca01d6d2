"""Most decode graphs are captured after the first answers, while the engine is idle.

A batch runs on the graph of the next larger size. So a start captures the largest size, into whose memory the others
fit, the smallest ones, and powers of two: from then on each batch has a graph, which computes at most twice what it
needs, also in an engine that is never idle. The sizes in between follow one at a time (weightcache.engine.late_graphs),
and each is used as soon as it is there. The low-order bits of a result may differ with the size, as they do with every
other batch that is padded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weightcache.engine import adapter_graphs as sglang

logger = logging.getLogger(__name__)

SMALLEST = 8
"""Requests; up to here every size is captured before the first answer."""


@dataclass(slots=True)
class LateDecode:
    """The sizes that wait in this process. ``why_at_once``: what forbids that for a ModelRunner, or an empty text."""

    why_at_once: Callable[[Any], str]
    runner: Any = None
    """The runner of decode graphs, from its first capture on until all sizes are there."""
    left: list[int] = field(default_factory=list)
    """Sizes (numbers of requests) that are not captured yet, the largest one last."""
    begun: bool = False
    seconds: float = 0.0
    number: int = 0
    free_before: int = 0

    def around_capture(self, original: Callable[..., Any], runner: Any) -> Any:
        """Capture a few sizes. To be called once: what captures again while the engine serves is left alone."""
        if not sglang.captures_decode(runner):
            return original(runner)
        self.begun = True
        sizes = sorted(runner.capture_bs)
        first = [size for size in sizes if size <= SMALLEST or size == sizes[-1] or not size & (size - 1)]
        if len(first) == len(sizes):
            return original(runner)
        why = self._why(runner)
        if not sglang.all_ranks(not why):
            logger.info("weightcache: all decode graphs are captured at once: %s", why or "another rank's reason")
            return original(runner)
        runner.capture_bs = first
        result = original(runner)
        self.runner, self.left = runner, [size for size in sizes if size not in first]
        logger.info(
            "weightcache: %d of %d decode graphs will be captured when the engine is idle", len(self.left), len(sizes)
        )
        return result

    def _why(self, runner: Any) -> str:
        try:
            return self.why_at_once(runner.model_runner) or sglang.why_decode_at_once(runner)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's vote
            return f"{type(error).__name__}: {error}"

    def step(self) -> None:
        """Capture one size. Raises whatever SGLang raises."""
        started = time.monotonic()
        if not self.number:
            self.free_before = sglang.free_bytes(self.runner.model_runner)
        size = self.left[-1]
        # On the stream of the first capture: torch gives a graph pool's memory again only to the same one.
        with sglang.only_decode(self.runner, [size], self.runner.stream):
            self.runner.capture()
        self.left.pop()
        self.runner.capture_bs = sorted([*self.runner.capture_bs, size])
        self.number += 1
        self.seconds += time.monotonic() - started
        if not self.left:
            self._finish()

    def _finish(self) -> None:
        model_runner = self.runner.model_runner
        taken = max(self.free_before - sglang.free_bytes(model_runner), 0) / 2**30
        sglang.account(model_runner, "decode", taken, self.seconds)
        logger.info("weightcache: captured %d decode graphs in %.1f s, %.2f GiB", self.number, self.seconds, taken)
        self.runner = None

    def give_up(self, why: str) -> None:
        """Go on with the sizes that are there."""
        logger.warning(
            "weightcache: %d decode graphs are not captured, batches are padded more: %s", len(self.left), why
        )
        self.left, self.runner = [], None
