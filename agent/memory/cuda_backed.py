"""GPU addresses that stay, with memory behind them that comes and goes: what an engine's KV buffers are made of.

CUDA Driver API, section "Virtual Memory Management". Tensors and captured graphs name addresses, so that memory may be
given back and taken again under them. On an NVIDIA H200 that takes tens of milliseconds for 60 GiB, and the 60 GiB of a
process that is killed are free when it is gone, some 100 ms later (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from weightcache.errors import DeviceUnavailable
from weightcache.memory.cuda_vmm import CudaError, _ArrayInterface, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.memory.cuda_vmm import CudaMemory


PIECE = 2 << 30
"""Bytes of one allocation at most. Size matters little to the driver; that there are few calls does
(docs/measurements.md).
"""
PAUSE_SECONDS = 0.002
"""Between two attempts to have a piece of memory that somebody is giving back."""


class CudaBacked:
    """Ranges of addresses of one GPU, each with memory behind its first bytes, as many as are wanted at the time.

    Nobody may use what has no memory: a kernel that does ends its process.
    """

    def __init__(self, memory: CudaMemory, spans: Sequence[int]) -> None:
        """Reserve a range of at least ``spans[i]`` bytes each. Raises NoRoom or DeviceUnavailable."""
        self._memory = memory
        self._ranges: list[_Range] = []
        with memory.failures(DeviceUnavailable, f"cannot reserve {sum(spans)} bytes of GPU addresses"):
            try:
                for span in spans:
                    size = self._rounded(span)
                    with memory.current():
                        base = int(memory.driver.cuMemAddressReserve(size, memory.granularity, 0, 0))
                    self._ranges.append(_Range(base, size))
            except CudaError:
                self.close()
                raise

    @property
    def backed(self) -> int:
        """Bytes of memory behind all ranges."""
        return sum(entry.backed for entry in self._ranges)

    def back(self, sizes: Sequence[int], deadline: float | None = None) -> float:
        """Have memory behind at least the first ``sizes[i]`` bytes of each range; its bytes are undefined.

        Memory that is not free is waited for until ``deadline`` (time.monotonic()), piece by piece: what there is, is
        kept meanwhile, since whatever is given back has to be cleared by the driver before anybody gets it again. The
        seconds that this waited. Raises NoRoom or DeviceUnavailable; what was backed before stays as it was then, and
        nothing else is.
        """
        memory = self._memory
        wanted = self._within(sizes)
        done: list[tuple[_Range, int]] = []
        waited = 0.0
        with memory.failures(DeviceUnavailable, f"cannot back {sum(wanted)} bytes of GPU addresses"), memory.current():
            try:
                for entry, size in zip(self._ranges, wanted, strict=True):
                    if size > entry.backed:
                        done.append((entry, entry.backed))
                        while size > entry.backed:
                            waited += self._extend_by(entry, min(size - entry.backed, PIECE), deadline)
            except CudaError:
                for entry, before in done:
                    self._cut(entry, before)
                raise
        return waited

    def give_back(self, sizes: Sequence[int]) -> None:
        """Give back the memory behind all but the first ``sizes[i]`` bytes of each range, after the device is done.

        As ``back`` took it: a piece goes as a whole or stays as a whole. Raises DeviceUnavailable.
        """
        memory = self._memory
        wanted = self._within(sizes)
        with memory.failures(DeviceUnavailable, "cannot give GPU memory back"), memory.current():
            memory.driver.cuCtxSynchronize()
            for entry, size in zip(self._ranges, wanted, strict=True):
                self._cut(entry, size)

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The whole range ``index`` as a contiguous tensor; it does not keep the range alive."""
        entry = self._ranges[index]
        count = dtype.itemsize
        for size in shape:
            count *= size
        if count > entry.size:
            raise ValueError(f"{count} bytes in a range of {entry.size}")
        device = torch.device("cuda", self._memory.device)
        flat = torch.as_tensor(_ArrayInterface(entry.base, count), device=device)
        return flat.view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Give back memory and addresses; best effort, as after a GPU fault every call fails."""
        driver = self._memory.driver
        with contextlib.suppress(CudaError), self._memory.current():
            with contextlib.suppress(CudaError):
                driver.cuCtxSynchronize()
            while self._ranges:
                entry = self._ranges.pop()
                with contextlib.suppress(CudaError):
                    self._cut(entry, 0)
                with contextlib.suppress(CudaError):
                    driver.cuMemAddressFree(entry.base, entry.size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._memory.granularity) * self._memory.granularity

    def _within(self, sizes: Sequence[int]) -> list[int]:
        wanted = [self._rounded(size) for size in sizes]
        if len(wanted) != len(self._ranges) or any(
            not 0 <= size <= entry.size for size, entry in zip(wanted, self._ranges, strict=True)
        ):
            raise ValueError(f"sizes that are not those of the ranges: {list(sizes)}")
        return wanted

    def _extend_by(self, entry: _Range, size: int, deadline: float | None) -> float:
        """One more piece, before ``deadline``; the seconds until there was memory for it. Raises CudaError."""
        begin = time.monotonic()
        waited = 0.0
        while True:
            try:
                self._extend(entry, size)
            except CudaError as error:
                now = time.monotonic()
                if deadline is None or now >= deadline or not is_out_of_memory(error):
                    raise
                waited = now - begin + PAUSE_SECONDS
                time.sleep(PAUSE_SECONDS)
            else:
                return waited

    def _extend(self, entry: _Range, size: int) -> None:
        memory = self._memory
        address = entry.base + entry.backed
        handle = memory.driver.cuMemCreate(size, memory.properties(), 0)
        try:
            memory.driver.cuMemMap(address, size, 0, handle, 0)
            try:
                memory.set_access(address, size, writable=True)
            except BaseException:
                with contextlib.suppress(CudaError):
                    memory.driver.cuMemUnmap(address, size)
                raise
        finally:
            # The mapping keeps the memory; a handle left open would outlive it.
            with contextlib.suppress(CudaError):
                memory.driver.cuMemRelease(handle)
        entry.pieces.append(size)

    def _cut(self, entry: _Range, keep: int) -> None:
        while entry.pieces and entry.backed - entry.pieces[-1] >= keep:
            size = entry.pieces[-1]
            self._memory.driver.cuMemUnmap(entry.base + entry.backed - size, size)
            entry.pieces.pop()


class _Range:
    """``size`` reserved bytes at ``base``, of which ``pieces`` are backed, one allocation each, from its start on."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.pieces: list[int] = []

    @property
    def backed(self) -> int:
        return sum(self.pieces)
