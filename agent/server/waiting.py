"""Waiting for the first of several events, and for any change at all."""

from __future__ import annotations

import asyncio


async def first(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Return when one of ``events`` is set, or after ``seconds`` seconds."""
    if any(event.is_set() for event in events):
        return
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


class Changes:
    """Wakes everybody who waits, once for each change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change."""
        return self._next

    async def wait(self, seconds: float | None = None) -> None:
        """Return at the next change, or after ``seconds`` seconds."""
        await first(self._next, seconds=seconds)
