"""What compilers wrote since a moment, in a stamp's directory and where they were left or told to write."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from weightcache.compiled import places
from weightcache.compiled.entry import Entry, Measured, walk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Written:
    """Files that were not there when this was made, by their paths."""

    def __init__(self, entry: Entry, environment: Mapping[str, str]) -> None:
        self._entry = entry
        self._environment = environment
        self._before = frozenset(self._files())

    def since(self) -> Measured:
        """How many there are now, and their bytes."""
        new = [length for path, length in self._files().items() if path not in self._before]
        return Measured(len(new), sum(new))

    def _files(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for folder in (self._entry.directory, *places.elsewhere(self._environment, self._entry.stay)):
            for path in walk(folder):
                with contextlib.suppress(OSError):
                    found[path] = path.lstat().st_size
        return found
