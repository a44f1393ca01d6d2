"""The lever ``caches``: compilers write into the directory of this environment, which stays in use for this start."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from weightcache.compiled import places, stamp, store
from weightcache.errors import WeightcacheError
from weightcache.launch.console import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightcache.config import CompiledConfig

MEASURE_SECONDS = 3600.0
"""An engine that is started again and again need not have all files counted every time."""


@contextlib.contextmanager
def kept(levers: Sequence[str], limits: CompiledConfig, python: str) -> Iterator[Mapping[str, str]]:
    """What the server's environment gets besides, with the directory held meanwhile; nothing where that cannot be.

    A server that is started after its environment was changed needs another one: enter this for every start.
    """
    with contextlib.ExitStack() as stack:
        variables: Mapping[str, str] = {}
        if "caches" in levers:
            try:
                wanted = stamp.of(python)
                found = store.of_user()
                held = stack.enter_context(found.hold(wanted, os.environ))
                packaged = "flashinfer-cubin" in wanted.facts
                variables = places.variables(held.entry.directory, os.environ, held.entry.stay, packaged)
                places.make(held.entry.directory)
                for entry in found.collect(limits, held.entry.stamp, MEASURE_SECONDS):
                    say(
                        f"compiled kernels of {entry.directory} were removed: see max_bytes and keep_days in [compiled]"
                    )
            except (WeightcacheError, OSError) as error:
                say(f"compiled kernels are kept where SGLang keeps them: {error}")
        yield variables
