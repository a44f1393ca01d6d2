"""What variables SGLang sets before it starts its children, seen at children that were started: stdlib only.

SGLang's main process puts dozens of its own variables into its environment, depending on options and model, and its
children read some of them while they are imported. So parked children import under the environment that the last
spawned ones had. The kernel shows it as it was at exec, until a process writes a title over it (setproctitle), which
SGLang's do once they have imported everything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from weightcache.launch.processes import children

_SPAWNED = b"multiprocessing.spawn import spawn_main"
Changes = dict[str, str | None]
"""Variables that are set (or, None, not there) beside those of the main process."""


class Learned:
    """The environments of the children of one server, in the order of their starts."""

    def __init__(self) -> None:
        self._server = 0
        self._found: dict[int, dict[str, str]] = {}
        self._known: tuple[dict[str, str], ...] = ()

    def look(self, server: int) -> None:
        """Look at a server that is starting, every second or so."""
        if server != self._server:
            self._server, self._found = server, {}
        for pid in sorted(children(server)):  # numbers only go down once in some 4 million starts
            if pid not in self._found and (environment := _spawned_with(pid)):
                self._found[pid] = environment
        if self._found and len(self._found) >= len(self._known):
            self._known = tuple(self._found.values())

    def changes(self, environment: Mapping[str, str]) -> tuple[Changes, ...]:
        """The known children's variables that differ from ``environment``, in the order of their starts."""
        return tuple(
            {name: known.get(name) for name in {*known, *environment} if known.get(name) != environment.get(name)}
            for known in self._known
        )


def _spawned_with(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        if _SPAWNED in Path(f"/proc/{pid}/cmdline").read_bytes():
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            pairs = (os.fsdecode(entry).partition("=") for entry in entries)
            return {name: value for name, equals, value in pairs if name and equals}
    return {}
