"""Copy a loaded model into arenas, storage by storage, giving each original back as soon as it is copied.

The peak is the shard, one arena and the largest storage: arenas are created only when the next piece needs one, and
what was freed is handed back to the driver or the kernel first, since torch's and C's allocators would keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

import torch

from weightcache import manifest
from weightcache.loader.export import Export, Piece
from weightcache.memory import WritableRegion
from weightcache.memory.views import view


def pack(
    export: Export,
    region: WritableRegion,
    arenas: Sequence[int],
    *,
    keep_private: bool,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Fill ``region`` with ``export``'s pieces, growing it by ``arenas`` (bytes each), and rebind the tensors to it.

    With ``keep_private`` the tensors of private pieces keep their own memory (an engine goes on using them); without,
    everything moves. ``on_progress`` is told the bytes copied so far.
    """
    arenas = list(arenas)
    export.pieces.reverse()
    while export.pieces:
        piece = export.pieces.pop()
        size = piece.source.numel()
        padded = -(-size // manifest.ALIGNMENT) * manifest.ALIGNMENT
        while region.size < piece.offset + padded:
            _hand_back(piece.source)
            region.extend(arenas.pop(0))
        if size:
            target = region.bytes_at(piece.offset, padded)
            target[:size].copy_(piece.source)
            target[size:].zero_()  # digests cover the gaps
        if piece.shared or not keep_private:
            _rebind(piece, region)
        on_progress(piece.offset + size)
        del piece  # the last reference to the original
    for size in arenas:  # a set without a single byte still has an arena
        region.extend(size)
    _hand_back(region.bytes_at(0, 0))


def _hand_back(tensor: torch.Tensor) -> None:
    """Give memory of the tensor's kind that was freed back to the system."""
    if tensor.is_cuda:
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(AttributeError):  # only glibc has it, and only glibc needs it
        ctypes.CDLL(None).malloc_trim(0)


def _rebind(piece: Piece, region: WritableRegion) -> None:
    """Point every tensor of ``piece`` at its copy: the objects stay the same, and with them every alias."""
    base = region.bytes_at(piece.offset, piece.source.numel())
    for tensor, offset in piece.views:
        tensor.data = view(base, offset, tensor.shape, tensor.stride(), tensor.dtype)
