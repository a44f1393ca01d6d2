"""The driver's calls in one thread, while another one computes: whose turn it is with the interpreter.

Each call of the driver gives the interpreter away. To have it back takes sys.getswitchinterval(), 5 ms, beside a thread
that never waits, such as a scheduler's event loop. With hundreds of calls, 78 GB of KV memory took up to 6.6 s on an
H200 instead of 0.1 (docs/measurements.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TURN_SECONDS = 5e-5


@contextmanager
def short_turns() -> Iterator[None]:
    """Whoever asks for the interpreter has it soon. For one thread at a time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
