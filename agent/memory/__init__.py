"""Shareable memory: one file per kind behind one small interface.

A weight set occupies one linear range of addresses, its arenas back to back, so that a tensor of any size has a place
and an offset means the same in every process. Writers reserve the range and extend it arena by arena; readers map all
arenas read-only. ``memfd`` is standard library only (the agent uses it); the other modules need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
LARGE_PAGE = 512 << 20
"""Largest page of Hopper's MMU in bytes: mapping 96 GiB aligned to it took 4.0 ms instead of 5.4 on an H200."""

MAX_ARENAS = 250


class Region(Protocol):
    """All arenas of one set, mapped read-only. It must outlive every tensor made from it."""

    size: int

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A uint8 tensor over ``size`` bytes at ``offset``, on the region's device, without a copy."""
        ...

    def close(self) -> None:
        """Unmap. No tensor of the region may be used afterwards."""
        ...


class WritableRegion(Protocol):
    """Arenas under construction, mapped for writing."""

    size: int
    """Bytes that arenas back so far."""

    def extend(self, size: int) -> None:
        """Create one more arena of ``size`` bytes (a multiple of the granularity) at the end. Raises NoRoom."""
        ...

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """A writable uint8 tensor over ``size`` bytes at ``offset``."""
        ...

    def freeze(self) -> tuple[int, ...]:
        """Make this process's own mapping read-only in place and return one descriptor per arena (the caller's)."""
        ...

    def close(self) -> None:
        """Unmap and forget the arenas; they live on where their descriptors are held."""
        ...


class Memory(Protocol):
    """One kind of shareable memory on one device."""

    name: str
    granularity: int

    def reserve(self, size: int) -> WritableRegion:
        """Reserve addresses for ``size`` bytes without backing them."""
        ...

    def map(self, fds: Sequence[int], sizes: Sequence[int]) -> Region:
        """Map arenas back to back, read-only; the descriptors stay the caller's. Raises AttachFailed."""
        ...

    def free_bytes(self) -> int:
        """Free memory on the device (or host) now."""
        ...


def open_memory(backend: str, device: int = 0) -> Memory:
    """The memory of ``backend`` (``host`` or ``cuda``) on CUDA device ordinal ``device``. Raises DeviceUnavailable."""
    if backend == "host":
        from weightcache.memory.host import HostMemory

        return HostMemory()
    from weightcache.memory.cuda_vmm import CudaMemory

    return CudaMemory(device)


def arena_sizes(total: int, granularity: int, arena_bytes: int = 0) -> tuple[int, ...]:
    """Split ``total`` bytes into arenas: 1 GiB each up to 32 GiB, beyond that a 32nd of the set, the last one trimmed.

    ``arena_bytes`` > 0 overrides the size. All sizes are multiples of ``granularity``, and there are never more arenas
    than descriptors that fit one packet. Sizes chosen here are multiples of LARGE_PAGE.
    """

    def up(size: int, multiple: int = granularity) -> int:
        return -(-size // multiple) * multiple

    total = up(max(total, 1))
    size = up(max(arena_bytes or up(max(GIB, -(-total // 32)), LARGE_PAGE), -(-total // MAX_ARENAS)))
    whole, rest = divmod(total, size)
    return (size,) * whole + ((rest,) if rest else ())
