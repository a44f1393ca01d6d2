"""Graphs are captured after the first answers, while the engine is idle, instead of before them.

Decode graphs of a model for one GPU take some five seconds, prefill graphs more than ten. Of decode graphs a few are
enough to begin with (weightcache.engine.late_decode). Until prefill graphs are there prefill runs eagerly: the same
kernels, launched one by one, on batches that are not padded, so that the low-order bits of a result may differ before
and after. One size is captured at a time, and a request that comes meanwhile waits for that one only. Nothing of the
engine's arguments or of its KV pool changes, which has left room for the graphs.

All ranks do the same in the same step: a rank that captures waits for the others inside collectives.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightcache.engine import adapter_graphs as sglang, state
from weightcache.engine.late_decode import LateDecode

logger = logging.getLogger(__name__)

LEVER = "graphs"
QUIET_SECONDS = 1.0
"""How long nothing ran before a size is captured."""
UNASKED_SECONDS = 10.0
"""The same for an engine that has not run anything yet: the first request is about to come."""
ROOM_BYTES = 5 << 30
"""What has to be free. More than the 4 GiB below which SGLang itself makes none, each rank for itself."""


@dataclass(slots=True)
class Late:
    """The capture that waits in this process, and how far it is. ``took`` says whether all of these hooks took."""

    took: Callable[[AbstractSet[str]], bool]
    marker: Path | None = None
    """A file that exists while this engine captures; one that an earlier engine left behind says that it ended then."""
    model_runner: Any = None
    """Whose prefill graphs wait; None: nobody's."""
    preparing: bool = False
    prefill: Any = None
    """Its runner of prefill graphs, once it is made and until all its graphs are captured."""
    left: list[int] = field(default_factory=list)
    """Sizes (numbers of tokens) that are not captured yet, the largest one last."""
    stream: Any = None
    output: Any = None
    free_before: int = 0
    seconds: float = 0.0
    batches: int = 0
    active: float = 0.0
    """When something ran last."""
    decode: LateDecode = field(init=False)
    reason: str | None = None
    """Why no capture may wait, as soon as that was asked."""

    def __post_init__(self) -> None:
        self.decode = LateDecode(self._why_at_once)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """What is hooked in a scheduler."""
        return {
            sglang.CAPTURE_PREFILL: self.around_capture_prefill,
            sglang.PREFILL_CAPTURE: self.around_capture,
            sglang.DECODE_CAPTURE: self.around_capture_decode,
            sglang.ON_IDLE: self.around_on_idle,
        }

    @property
    def waits(self) -> bool:
        """Whether anything is to be captured yet."""
        return self.model_runner is not None or bool(self.decode.left)

    def around_capture_prefill(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer that there are no graphs, once, and remember whose they are."""
        model_runner = kwargs.get("model_runner")
        if self.model_runner is not None or not self._would_wait(model_runner):
            return original(*args, **kwargs)
        why = self._why_at_once(model_runner) or self._why_prefill(model_runner)
        if not sglang.all_ranks(not why):
            logger.info("weightcache: prefill graphs are captured before the first answer: %s", why or "another rank's")
            graphs = original(*args, **kwargs)
            self._mark(capturing=False)
            return graphs
        self.model_runner, self.active = model_runner, time.monotonic()
        logger.info(
            "weightcache: prefill graphs will be captured when the engine is idle; prefill runs eagerly till then"
        )
        return sglang.no_graphs()

    def _would_wait(self, model_runner: Any) -> bool:
        """The same on all ranks: it looks at nothing but the configuration."""
        try:
            return sglang.captures_prefill(model_runner) and self.took(self.hooks().keys())
        except Exception:  # a release that looks different starts as it would without this
            logger.warning("weightcache: prefill graphs are captured before the first answer", exc_info=True)
            return False

    def around_capture_decode(self, original: Callable[..., Any], runner: Any) -> Any:
        """Capture a few sizes now, if the hooks are there with which the others follow."""
        if self.decode.begun or not self.took(self.hooks().keys()):
            return original(runner)
        self.active = time.monotonic()
        result = self.decode.around_capture(original, runner)
        if self.reason:
            self._mark(capturing=False)
        return result

    def _why_at_once(self, model_runner: Any) -> str:
        """The answer is found once: a marker is removed by a capture that came at once."""
        if self.reason is None:
            self.reason = self._find_reason(model_runner)
        return self.reason

    def _find_reason(self, model_runner: Any) -> str:
        if not state.process.shares_weights:
            return "the weights came from disk"
        if self.marker is not None and self.marker.exists():
            return "an earlier engine ended while it captured them"
        try:
            return sglang.why_at_once(model_runner)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's vote
            return f"{type(error).__name__}: {error}"

    def _why_prefill(self, model_runner: Any) -> str:
        try:
            return sglang.why_prefill_at_once(model_runner)
        except Exception as error:  # noqa: BLE001 - the same
            return f"{type(error).__name__}: {error}"

    def _mark(self, capturing: bool) -> None:
        """Leave word for the next engine while a capture may be what ends this one."""
        if self.marker is not None:
            with contextlib.suppress(OSError):
                self.marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.marker.touch(0o600) if capturing else self.marker.unlink(missing_ok=True)

    def around_capture(self, original: Callable[..., Any], runner: Any) -> Any:
        """Make the runner without its graphs."""
        return None if self.preparing else original(runner)

    def around_on_idle(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Take one step, if there is one to take."""
        if not self.waits:
            return original(scheduler)
        self.step(scheduler)
        if self.left or self.decode.left:
            with sglang.awake(scheduler):
                return original(scheduler)
        return original(scheduler)

    def step(self, scheduler: Any) -> None:
        """Make the runner, or capture one size, if all ranks have been idle for long enough.

        An engine without others goes on without these graphs if there is no memory for them; what else fails ends it,
        as it would at its start, since nobody knows what a failed capture leaves behind.
        """
        if not sglang.all_ranks(self._quiet(scheduler)):
            return
        state.process.capturing = True  # until it is over, and for good where it fails
        decode = bool(self.decode.left)
        try:
            self._step_decode() if decode else self._step_prefill()
        except Exception as error:
            if not (sglang.is_out_of_memory(error) and sglang.is_alone()):
                raise
            why = "the device has no memory left"
            self.decode.give_up(why) if decode else self._give_up(why)
        state.process.capturing = False
        if not self.waits:
            self._mark(capturing=False)

    def _step_decode(self) -> None:
        self._mark(capturing=True)
        self.decode.step()

    def _step_prefill(self) -> None:
        started = time.monotonic()
        if self.prefill is None:
            self._prepare()
        else:
            self._capture(self.left.pop())
        self.seconds += time.monotonic() - started
        if self.prefill is not None and not self.left:
            self._finish()

    def _quiet(self, scheduler: Any) -> bool:
        now, batches = time.monotonic(), sglang.batches(scheduler)
        if batches != self.batches:
            self.batches, self.active = batches, now
        return sglang.is_idle(scheduler) and now - self.active >= (QUIET_SECONDS if batches else UNASKED_SECONDS)

    def _prepare(self) -> None:
        runner = self.model_runner
        self.free_before = sglang.free_bytes(runner)
        if not sglang.all_ranks(self.free_before >= ROOM_BYTES):
            self._give_up(
                f"{self.free_before / 1e9:.1f} GB are free on this rank, and {ROOM_BYTES / 1e9:.1f} are needed"
            )
            return
        self._mark(capturing=True)
        self.preparing = True
        try:
            runner.init_prefill_cuda_graph()
        finally:
            self.preparing = False
        if not sglang.is_prefill_runner(runner.prefill_cuda_graph_runner):
            self._forget()  # SGLang has said why
            return
        self.prefill, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, None
        self.left = sorted(self.prefill.capture_num_tokens)
        self.stream = sglang.new_stream(self.prefill)

    def _capture(self, size: int) -> None:
        # The largest one first: the others fit into the memory that it took.
        with sglang.only(self.prefill, [size], self.stream, self.output):
            self.prefill.capture()
        self.output = sglang.output_of(self.prefill)

    def _finish(self) -> None:
        runner, prefill = self.model_runner, self.prefill
        taken = max(self.free_before - sglang.free_bytes(runner), 0) / 2**30
        sglang.account(runner, "prefill", taken, self.seconds)
        runner.prefill_cuda_graph_runner = prefill
        number = len(prefill.capture_num_tokens)
        logger.info("weightcache: captured %d prefill graphs in %.1f s, %.2f GiB", number, self.seconds, taken)
        self._forget()

    def _give_up(self, why: str) -> None:
        logger.warning("weightcache: no prefill graphs, prefill stays eager: %s", why)
        self._forget()

    def _forget(self) -> None:
        self.model_runner = self.prefill = self.stream = self.output = None
        self.left = []
