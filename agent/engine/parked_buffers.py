"""Buffers of KV memory: addresses from their making on, memory behind all of them only while it is wanted.

What an engine uses before it owns its KV memory has memory all the time: graphs are captured on that, and a warm-up
runs on it. SGLang makes its buffers in two ways. Some pools have a carrier for memory that comes later, whose place
KvBuffers takes; all others make tensors of zeros, and Reserving stands in for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightcache.memory.cuda_backed import CudaBacked, Extents, rounded
from weightcache.memory.cuda_vmm import CudaMemory

_DEVICE = "cuda"


class Parked:
    """Ranges of addresses of one GPU of which the parts ``kept`` have memory all the time, and all has after ``take``.

    Bytes; ``zeroed``: memory that comes is zero. Raises NoRoom or DeviceUnavailable.
    """

    made: list[Parked] = []  # noqa: RUF012  those of this process
    memory: Callable[[int], CudaMemory] = CudaMemory

    def __init__(
        self, memory: CudaMemory, spans: Sequence[int], kept: Sequence[Extents], *, zeroed: bool = False
    ) -> None:
        self._kept = kept
        self._whole: list[Extents] = [[(0, span)] for span in spans]
        self._backed = CudaBacked(memory, spans, zeroed=zeroed)
        try:
            self._backed.back(kept)
        except BaseException:
            self._backed.close()
            raise
        Parked.made.append(self)

    @property
    def backed_bytes(self) -> int:
        """Bytes of memory behind the buffers now."""
        return self._backed.backed

    @property
    def whole_bytes(self) -> int:
        """Bytes of memory behind the buffers after ``take``, but for what the driver rounds up."""
        return sum(end - start for parts in self._whole for start, end in parts)

    @property
    def slack_bytes(self) -> int:
        """Of these, what is kept: more than the page or state that belongs to nobody, which SGLang does not count."""
        return sum(end - start for parts in self._kept for start, end in parts)

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The buffer ``index``, contiguous."""
        return self._backed.tensor(index, shape, dtype)

    def take(self, deadline: float) -> float:
        """Have memory behind everything before ``deadline`` (time.monotonic()); the seconds that this waited for some.

        Raises NoRoom or DeviceUnavailable.
        """
        return self._backed.back(self._whole, deadline)

    def give_back(self) -> None:
        """Give back all memory but that of the parts that are kept. Raises DeviceUnavailable."""
        self._backed.give_back(self._kept)

    def close(self) -> None:
        """Give back everything; the tensors must not be used any more."""
        self._backed.close()
        if self in Parked.made:
            Parked.made.remove(self)


class KvBuffers(Parked):
    """The buffers of one KV pool; takes the place of SGLang's KvVmmBufferOwner, and has its six members.

    ``buffer_descs`` say shape and spans of each buffer (sglang.srt.mem_cache.memory_pool.KvBufferDesc).
    """

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
        memory = Parked.memory(device_id)
        # The page before the first token is for what has no place.
        first = min(KvBuffers.first_tokens + page_size, reserved_num_tokens)
        self._first = [max(memory.granularity, desc.prefix_span_bytes(first, page_size)) for desc in self._descs]
        spans = [desc.reserved_span_bytes(store_dtype.itemsize) for desc in self._descs]
        super().__init__(memory, spans, [[(0, size)] for size in self._first])
        try:
            self.tensors = [self.tensor(index, desc.shape, store_dtype) for index, desc in enumerate(self._descs)]
        except BaseException:
            self.close()
            raise

    def ensure_prefix(self, num_tokens: int) -> None:
        """Have memory for the first tokens. Raises ValueError for more than fit the first piece."""
        spans = [desc.prefix_span_bytes(num_tokens, self._page) for desc in self._descs]
        if any(span > first for span, first in zip(spans, self._first, strict=True)):
            raise ValueError(f"{num_tokens} tokens are asked for before the engine owns its KV memory")

    def finalize(self, final_num_tokens: int) -> None:
        """Note how many tokens the pool is going to have; their memory comes with ``take``."""
        if self._descs and not self._page <= final_num_tokens <= self._reserved:
            raise ValueError(f"{final_num_tokens} tokens in a pool of {self._reserved}")
        self._whole = [[(0, desc.final_span_bytes(final_num_tokens, self._page))] for desc in self._descs]

    def close(self) -> None:
        """Give back everything; the tensors must not be used any more."""
        self.tensors = []
        super().close()


class Reserving(TorchFunctionMode):  # type: ignore[misc]  # torch says nothing of its types
    """While it is entered, torch.zeros on the GPU makes parked tensors, of which the first ``rows`` are kept.

    ``dim`` is the dimension of the rows; what has fewer dimensions, or is not larger than what would be kept of it, is
    made as usual. Raises NoRoom or DeviceUnavailable.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self._rows, self._dim = rows, dim
        self._memory: CudaMemory | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Around every function of torch."""
        kwargs = kwargs or {}
        if func is torch.zeros and torch.device(kwargs.get("device") or "cpu").type == _DEVICE:
            wanted = func(*args, **{**kwargs, "device": "meta"})
            device = torch.device(kwargs["device"]).index
            made = self._made(wanted, torch.cuda.current_device() if device is None else device)
            if made is not None:
                return made
        return func(*args, **kwargs)

    def _made(self, wanted: torch.Tensor, device: int) -> torch.Tensor | None:
        if wanted.dim() <= self._dim or not wanted.numel():
            return None
        shape, size = wanted.shape, wanted.numel() * wanted.itemsize
        row = math.prod(shape[self._dim + 1 :]) * wanted.itemsize
        plane = shape[self._dim] * row
        first = min(self._rows, shape[self._dim]) * row
        kept = [(start, start + first) for start in range(0, size, plane)]
        # All tensors of a pool are on one GPU.
        self._memory = memory = self._memory or Parked.memory(device)
        if sum(end - start for start, end in rounded(kept, memory.granularity)) >= size:
            return None
        return Parked(memory, [size], [kept], zeroed=True).tensor(0, shape, wanted.dtype)
