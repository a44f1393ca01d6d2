"""Label values out of what agents and publishers say: short, printable, and of few different kinds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weightcache.monitor.families import OTHER

if TYPE_CHECKING:
    from collections.abc import Collection

LONGEST = 100
SHORT = 12
"""Characters of a digest or a revision that tell it from others."""

_ROLE = re.compile(r"target|draft-\d", re.ASCII)
_HUB = re.compile(r"models--([^-]\S*?)--(\S+)")
_MOST = 2**63


def clean(text: str, longest: int = LONGEST) -> str:
    """``text`` in one line of at most ``longest`` printable characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:longest])


def known(value: str, values: Collection[str]) -> str:
    """``value`` if it is one of ``values``, else OTHER."""
    return value if value in values else OTHER


def role(value: str) -> str:
    """``target`` or ``draft-0`` to ``draft-9``, else OTHER."""
    return value if _ROLE.fullmatch(value) else OTHER


def model(value: str) -> str:
    """A model's name: a hub's ``owner/name`` as it is, of a path the last part, unless it lies in a hub's cache."""
    parts = [part for part in value.split("/") if part]
    for part in parts:
        if match := _HUB.fullmatch(part):
            return clean(f"{match[1]}/{match[2]}")
    if len(parts) == 2 and value[0] not in "/.~":
        return clean(value)
    return clean(parts[-1]) if parts else ""


def number(value: float) -> float:
    """A count, a size or a time as any client can read it."""
    return min(max(value, 0), _MOST)
