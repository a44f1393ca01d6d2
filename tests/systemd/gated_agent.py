"""The agent as it is installed, with gates in places that nothing outside can hold it at. For ExecStart= in a drop-in.

Where /run/weightcache/gates holds a FIFO named after a gate, the agent writes NAME.reached (its number) and does
nothing at all until somebody writes to the FIFO:

    storing      one of a set's descriptors is in the store
    stored       all of a commit is in the store, and the store said so
    committed    the sets are visible, and the loader does not know it
    adopting     sets came back from the store, which was not asked yet
    adopted      the store has confirmed them

WCTEST_BLIND: the agent believes that the store took everything, as an agent without the canary would.
WCTEST_PROBE: seconds between two looks at the store.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = ["/usr/lib/weightcache", "/usr/lib/weightcache/vendor"]

from weightcache.server import fdstore  # noqa: E402
from weightcache.server.__main__ import main  # noqa: E402
from weightcache.server.app import Agent  # noqa: E402
from weightcache.server.fdstore import FdStore  # noqa: E402
from weightcache.server.notify import Manager  # noqa: E402

GATES = Path("/run/weightcache/gates")


def pause(name: str) -> None:
    """Wait at a gate, if it is there."""
    fifo = GATES / name
    if not fifo.is_fifo():
        return
    temporary = GATES / f".{name}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(GATES / f"{name}.reached")
    with fifo.open("rb") as opened:
        opened.read(1)


def install() -> None:
    """Put the gates in."""
    adopt, keep, store, commit = FdStore.adopt, FdStore.keep, Manager.store, Agent.commit

    async def gated_adopt(self: FdStore, *arguments: Any) -> None:
        pause("adopting")
        await adopt(self, *arguments)
        pause("adopted")

    async def gated_keep(self: FdStore, *arguments: Any) -> None:
        await keep(self, *arguments)
        pause("stored")

    async def gated_store(self: Manager, name: str, fd: int) -> None:
        await store(self, name, fd)
        if name.endswith(".0"):
            await self.barrier()
            pause("storing")

    def gated_commit(self: Agent, *arguments: Any) -> Any:
        made = commit(self, *arguments)
        pause("committed")
        return made

    for cls, name, function in (
        (FdStore, "adopt", gated_adopt),
        (FdStore, "keep", gated_keep),
        (Manager, "store", gated_store),
        (Agent, "commit", gated_commit),
    ):
        setattr(cls, name, function)


def blind() -> None:
    """Ask the store nothing: no canary, no limit; what was read counts as kept."""

    async def plant(self: FdStore) -> Any:
        self._manager.limit = None
        await self._manager.barrier()
        return fdstore._Planted.HOLDS

    async def guarded(self: FdStore) -> bool:
        return True

    FdStore._plant = plant  # type: ignore[method-assign]
    FdStore._guarded = guarded  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    if os.environ.get("WCTEST_BLIND"):
        blind()
    fdstore.PROBE_SECONDS = float(os.environ.get("WCTEST_PROBE", fdstore.PROBE_SECONDS))
    sys.exit(main())
