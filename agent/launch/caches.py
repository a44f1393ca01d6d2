"""The lever ``caches``: compilers write into the directory of this environment, which stays in use for this start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import sglang_options
from weightcache.compiled import places, stamp, store
from weightcache.compiled.entry import WARMED
from weightcache.errors import WeightcacheError
from weightcache.launch import server_only
from weightcache.launch.console import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightcache.config import CompiledConfig

MEASURE_SECONDS = 3600.0
"""An engine that is started again and again need not have all files counted every time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A directory of compiled kernels in use, or none. ``variables`` are for the server's environment."""

    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    stay: tuple[str, ...] = ()
    """Variables whose compilers write where they always did."""

    def warmed(self, arguments: Sequence[str]) -> str:
        """The file that says of SGLang's ``arguments`` that they came to serve with these kernels; empty: none would.

        None would where kernels lie in a temporary directory, or in one of the operator's that has none. Arguments
        that only concern serving, keys among them, do not matter; the checkpoint and SGLang's variables do.
        """
        if self.directory is None or not _lasting(self.stay):
            return ""
        start = [server_only.without(arguments), _checkpoint(arguments), _variables(), os.environ.get("PWD", "")]
        digest = hashlib.sha256(json.dumps(start).encode()).hexdigest()
        return str(self.directory / WARMED / digest[:32])


def _lasting(stay: Sequence[str]) -> bool:
    temporary = Path(tempfile.gettempdir()).resolve()
    values = [os.environ[by] for _, by in places.operators(os.environ) if os.environ.get(by)]
    paths = {*places.elsewhere(os.environ, stay), *(Path(value) for value in values)}
    try:
        return not any(path.resolve().is_relative_to(temporary) or not any(path.iterdir()) for path in paths)
    except OSError:
        return False


def _variables() -> list[tuple[str, str]]:
    wanted = ("SGLANG_", "SGL_", "CUDA_", "TRITON_", "TORCH", "FLASHINFER_", "NCCL_")
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(wanted))


def _checkpoint(arguments: Sequence[str]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the checkpoint's files; nothing of one that is a name at a hub."""
    try:
        with os.scandir(sglang_options.given(arguments).text("model_path")) as files:
            return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return []


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
                result = Kept(variables, held.entry.directory, tuple(held.entry.stay))
                for entry in found.collect(limits, held.entry.stamp, MEASURE_SECONDS):
                    say(
                        f"compiled kernels of {entry.directory} were removed: see max_bytes and keep_days in [compiled]"
                    )
            except (WeightcacheError, OSError) as error:
                say(f"compiled kernels are kept where SGLang keeps them: {error}")
        yield result
