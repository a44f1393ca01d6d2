"""The metric families while they are filled with samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric

from weightcache.monitor import labels
from weightcache.monitor.families import FAMILIES

_FAMILIES = {family.name: family for family in FAMILIES}


class Page:
    """Adds samples by the family's name; ``values`` are those of its labels, in their order.

    ``created``: whether what counts says since when (``since``, seconds since the epoch; 0: not known).
    """

    def __init__(self, created: bool) -> None:
        self._created = created
        self._metrics = {family.name: Metric(family.name, family.help, family.type, family.unit) for family in FAMILIES}

    def filled(self) -> Iterator[Metric]:
        """All families that have samples."""
        return (metric for metric in self._metrics.values() if metric.samples)

    def add(self, name: str, values: tuple[str, ...], value: float, since: float = 0.0) -> None:
        """One sample of a gauge, a counter or an info."""
        suffix = {"counter": "_total", "info": "_info"}.get(_FAMILIES[name].type, "")
        self._sample(name, suffix, values, value)
        self._since(name, values, since)

    def one_of(self, name: str, values: tuple[str, ...], states: Sequence[str], current: str) -> None:
        """A sample for each state: 1 for the current one, 0 for all others."""
        for state in states:
            self.add(name, (*values, state), state == current)

    def summary(self, name: str, values: tuple[str, ...], count: int, total: float, since: float) -> None:
        """How many there were, and their sum."""
        self._sample(name, "_count", values, count)
        self._sample(name, "_sum", values, total)
        self._since(name, values, since)

    def histogram(
        self,
        name: str,
        values: tuple[str, ...],
        bounds: Sequence[float],
        counts: Sequence[int],
        total: float,
        since: float,
    ) -> None:
        """``counts`` are those up to each bound, not of those below it, and one for what is above all bounds."""
        seen = 0
        for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
            seen += max(count, 0)
            self._sample(name, "_bucket", values, seen, {"le": bound})
        self.summary(name, values, seen, total, since)

    def _sample(
        self, name: str, suffix: str, values: tuple[str, ...], value: float, more: Mapping[str, str] | None = None
    ) -> None:
        pairs = dict(zip(_FAMILIES[name].labels, values, strict=True))
        self._metrics[name].add_sample(name + suffix, pairs | dict(more or {}), labels.number(value))

    def _since(self, name: str, values: tuple[str, ...], since: float) -> None:
        if self._created and since:
            self._sample(name, "_created", values, since)
