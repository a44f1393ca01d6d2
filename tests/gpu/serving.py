"""An engine of one or several nodes while it runs, and what its ranks say of how they got their weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.gpu.rig import Started
from tests.support.engine import Engine

_DECISION = re.compile(
    r"weightcache: Decision\(rank=(?P<rank>\d+), .*?outcome='(?P<outcome>\w+)', code='(?P<code>[\w-]*)'"
    r".*?set_id='(?P<set>\w*)'.*?milliseconds=(?P<steps>\{[^}]*\}|None)\)"
)


@dataclass(slots=True)
class Serving:
    """A running engine: a process on each node, of which the first one answers."""

    parts: list[Engine]
    started: Started

    @property
    def first(self) -> Engine:
        """The one that answers."""
        return self.parts[0]

    def decisions(self) -> list[dict[str, Any]]:
        """How each rank got its weights, as the schedulers log it."""
        found = [match for part in self.parts for match in _DECISION.finditer(part.text())]
        return [
            {
                "rank": int(match["rank"]),
                "outcome": match["outcome"],
                "code": match["code"],
                "set": match["set"],
                "milliseconds": {} if match["steps"] == "None" else json.loads(match["steps"].replace("'", '"')),
            }
            for match in found
        ]

    def schedulers(self) -> set[int]:
        """The processes that hold weights."""
        return {process.pid for part in self.parts for process in part.schedulers()}
