"""The lever ``caches``: compilers write into the directory of this environment, which stays in use for this start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcache.compiled import places, stamp, store
from weightcache.errors import WeightcacheError
from weightcache.launch import server_only
from weightcache.launch.console import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from weightcache.config import CompiledConfig

MEASURE_SECONDS = 3600.0
"""An engine that is started again and again need not have all files counted every time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A directory of compiled kernels in use, or none. ``variables`` are for the server's environment."""

    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None

    def warmed(self, arguments: Sequence[str]) -> str:
        """The file that says of SGLang's ``arguments`` that they came to serve with these kernels; empty: none would.

        Arguments that only concern serving, keys among them, do not matter.
        """
        if self.directory is None:
            return ""
        digest = hashlib.sha256(json.dumps(server_only.without(arguments)).encode()).hexdigest()
        return str(self.directory / "warmed" / digest[:32])


@contextlib.contextmanager
def kept(levers: Sequence[str], limits: CompiledConfig, python: str) -> Iterator[Kept]:
    """The directory for this environment, held meanwhile; none where that cannot be.

    A server that is started after its environment was changed needs another one: enter this for every start.
    """
    with contextlib.ExitStack() as stack:
        result = Kept()
        if "caches" in levers:
            try:
                wanted = stamp.of(python)
                found = store.of_user()
                held = stack.enter_context(found.hold(wanted, os.environ))
                packaged = "flashinfer-cubin" in wanted.facts
                variables = places.variables(held.entry.directory, os.environ, held.entry.stay, packaged)
                places.make(held.entry.directory)
                result = Kept(variables, held.entry.directory)
                for entry in found.collect(limits, held.entry.stamp, MEASURE_SECONDS):
                    say(
                        f"compiled kernels of {entry.directory} were removed: see max_bytes and keep_days in [compiled]"
                    )
            except (WeightcacheError, OSError) as error:
                say(f"compiled kernels are kept where SGLang keeps them: {error}")
        yield result
