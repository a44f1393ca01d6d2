"""Where descriptors are kept besides this process. An acknowledged commit means: the keeper has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.server.sets import Complete


class Keeper(Protocol):
    """A second holder of every resident set's descriptors."""

    @property
    def kept(self) -> str:
        """Where they are, for the status: ``process`` (here only), ``store`` (safe) or ``lost`` (not safe now)."""
        ...

    async def keep(self, sets: Sequence[Complete]) -> None:
        """Return when the sets are safe. An error (a WeightcacheError) refuses the commit; nothing of it stays then.

        The descriptors stay the caller's, and stay open until ``take_back`` or ``forget``.
        """
        ...

    async def take_back(self, sets: Sequence[Complete]) -> None:
        """Let go of a commit that was given up after all: of all its sets together, whenever the agent is killed."""
        ...

    async def forget(self, set_id: str) -> None:
        """Let go of one set, before the agent closes its own descriptors; the others of its commit stay."""
        ...


class ProcessOnly:
    """No second holder: the weights live as long as the agent and the engines that map them."""

    kept = "process"

    async def keep(self, sets: Sequence[Complete]) -> None:
        """Nothing to do: the agent holds the descriptors already."""

    async def take_back(self, sets: Sequence[Complete]) -> None:
        """Nothing to do."""

    async def forget(self, set_id: str) -> None:
        """Nothing to do."""
