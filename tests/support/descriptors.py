"""A process that has run out of file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """This process can open so many more inside; what it has open stays so."""
    made = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)]
    for fd in made:
        os.close(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(made), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
