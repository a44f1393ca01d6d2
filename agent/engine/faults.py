"""Tell the agent that the device failed under this engine: memory that is kept for ever may have gone bad."""

from __future__ import annotations

import torch

from weightcache.engine import state

MARKS = ("CUDA error", "uncorrectable ECC", "an illegal memory access", "unspecified launch failure")
"""How torch words a device fault where it has no class of its own for it."""


def is_fault(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is a device's failure and not merely a lack of memory."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return False
        if isinstance(seen, torch.AcceleratorError) or any(mark in str(seen) for mark in MARKS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def report(error: BaseException) -> None:
    """Send the reason over every lease of this process if ``error`` is a device's fault.

    A capture that fails is worded like one, and says nothing about memory.
    """
    if is_fault(error) and not state.process.capturing:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for lease in state.process.leases:
            lease.fault(f"{type(error).__name__}: {reason}"[:400])
