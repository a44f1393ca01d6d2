"""GPU addresses that stay, with memory behind them that comes and goes: what an engine's KV buffers are made of.

CUDA Driver API, section "Virtual Memory Management". Tensors and captured graphs name addresses, so that memory may be
given back and taken again under them. On an NVIDIA H200 that takes tens of milliseconds for 60 GiB, and the 60 GiB of a
process that is killed are free when it is gone, some 100 ms later (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weightcache.errors import DeviceUnavailable
from weightcache.memory.cuda_vmm import CudaError, _ArrayInterface, is_out_of_memory

if TYPE_CHECKING:
    from weightcache.memory.cuda_vmm import CudaMemory


PIECE = 2 << 30
"""Bytes of one allocation at most. Size matters little to the driver; that there are few calls does
(docs/measurements.md).
"""
PAUSE_SECONDS = 0.002
"""Between two attempts to have a piece of memory that somebody is giving back."""


Extents = Sequence[tuple[int, int]]
"""Parts of a range, as (first byte, byte after the last one), one after the other."""


class CudaBacked:
    """Ranges of addresses of one GPU, each with memory behind some parts, those that are wanted at the time.

    Nobody may use what has no memory: a kernel that does ends its process.
    """

    def __init__(self, memory: CudaMemory, spans: Sequence[int], *, zeroed: bool = False) -> None:
        """Reserve a range of at least ``spans[i]`` bytes each. Raises NoRoom or DeviceUnavailable.

        ``zeroed``: memory that comes is zero; otherwise it is undefined.
        """
        self._memory = memory
        self._zeroed = zeroed
        self._ranges: list[_Range] = []
        with memory.failures(DeviceUnavailable, f"cannot reserve {sum(spans)} bytes of GPU addresses"):
            try:
                for span in spans:
                    size = -(-span // memory.granularity) * memory.granularity
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

    def back(self, wanted: Sequence[Extents], deadline: float | None = None) -> float:
        """Have memory behind at least the parts ``wanted[i]`` of each range.

        Memory that is not free is waited for until ``deadline`` (time.monotonic()), piece by piece: what there is, is
        kept meanwhile, since whatever is given back has to be cleared by the driver before anybody gets it again. The
        seconds that this waited. Raises NoRoom or DeviceUnavailable; what was backed before stays as it was then, and
        nothing else is.
        """
        memory = self._memory
        rounded = self._within(wanted)
        done: list[tuple[_Range, int]] = []
        waited = 0.0
        size = sum(end - start for parts in rounded for start, end in parts)
        with memory.failures(DeviceUnavailable, f"cannot back {size} bytes of GPU addresses"), memory.current():
            try:
                for entry, parts in zip(self._ranges, rounded, strict=True):
                    for start, end in entry.gaps(parts):
                        for at in range(start, end, PIECE):
                            waited += self._wait_for(entry, at, min(end - at, PIECE), deadline)
                            done.append((entry, at))
                if self._zeroed and done:
                    self._clear(done)
            except CudaError:
                for entry, at in reversed(done):
                    self._unmap(entry, at)
                raise
        return waited

    def give_back(self, kept: Sequence[Extents]) -> None:
        """Give back the memory behind all but the parts ``kept[i]`` of each range, after the device is done.

        As ``back`` took it: a piece goes as a whole or stays as a whole. Raises DeviceUnavailable.
        """
        memory = self._memory
        rounded = self._within(kept)
        with memory.failures(DeviceUnavailable, "cannot give GPU memory back"), memory.current():
            memory.driver.cuCtxSynchronize()
            for entry, parts in zip(self._ranges, rounded, strict=True):
                for at in entry.outside(parts):
                    self._unmap(entry, at)

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
                for at in list(entry.pieces):
                    with contextlib.suppress(CudaError):
                        self._unmap(entry, at)
                with contextlib.suppress(CudaError):
                    driver.cuMemAddressFree(entry.base, entry.size)

    def _within(self, wanted: Sequence[Extents]) -> list[Extents]:
        """The same parts in whole granules. Raises ValueError for what is not in the ranges."""
        if len(wanted) != len(self._ranges):
            raise ValueError(f"parts of {len(wanted)} ranges, of which there are {len(self._ranges)}")
        found = [rounded(parts, self._memory.granularity) for parts in wanted]
        for parts, entry in zip(found, self._ranges, strict=True):
            if parts and parts[-1][1] > entry.size:
                raise ValueError(f"part {parts[-1]} of a range of {entry.size} bytes")
        return found

    def _wait_for(self, entry: _Range, at: int, size: int, deadline: float | None) -> float:
        """One more piece, before ``deadline``; the seconds until there was memory for it. Raises CudaError."""
        begin = time.monotonic()
        waited = 0.0
        while True:
            try:
                self._map(entry, at, size)
            except CudaError as error:
                now = time.monotonic()
                if deadline is None or now >= deadline or not is_out_of_memory(error):
                    raise
                waited = now - begin + PAUSE_SECONDS
                time.sleep(PAUSE_SECONDS)
            else:
                return waited

    def _map(self, entry: _Range, at: int, size: int) -> None:
        memory = self._memory
        address = entry.base + at
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
        entry.pieces[at] = size

    def _unmap(self, entry: _Range, at: int) -> None:
        self._memory.driver.cuMemUnmap(entry.base + at, entry.pieces[at])
        del entry.pieces[at]

    def _clear(self, pieces: list[tuple[_Range, int]]) -> None:
        for entry, at in pieces:
            self._memory.driver.cuMemsetD8(entry.base + at, 0, entry.pieces[at])
        # Streams that do not wait for the default one may use it next.
        self._memory.driver.cuCtxSynchronize()


class _Range:
    """``size`` reserved bytes at ``base``; ``pieces``: those that are backed, one allocation each: offset and size."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.pieces: dict[int, int] = {}

    @property
    def backed(self) -> int:
        return sum(self.pieces.values())

    def gaps(self, parts: Extents) -> list[tuple[int, int]]:
        """Of ``parts``, which ascend, what is not backed."""
        found = []
        pieces = sorted(self.pieces.items())
        for start, end in parts:
            at = start
            for offset, size in pieces:
                if at < offset < end:
                    found.append((at, offset))
                if offset < end:
                    at = max(at, offset + size)
            if at < end:
                found.append((at, end))
        return found

    def outside(self, parts: Extents) -> list[int]:
        """The pieces, by offset, of which nothing is in ``parts``."""
        return [
            offset
            for offset, size in self.pieces.items()
            if not any(start < offset + size and offset < end for start, end in parts)
        ]


def rounded(parts: Extents, granularity: int) -> Extents:
    """``parts``, which ascend, in whole granules; those that touch are one. Raises ValueError for what is no part."""
    found: list[tuple[int, int]] = []
    for start, end in parts:
        if not 0 <= start <= end or (found and start < found[-1][0]):
            raise ValueError(f"no part of a range: {(start, end)} of {list(parts)}")
        low, high = start // granularity * granularity, -(-end // granularity) * granularity
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        elif start < end:
            found.append((low, high))
    return found
