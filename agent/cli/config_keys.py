"""Dotted keys of weightcache.toml on the command line: ``memory.backend``, ``rank[0].gpu``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from weightcache import config
from weightcache.config_decode import all_of, nearest
from weightcache.errors import UsageError

Step = str | int

_RANK = re.compile(r"rank\[(\d{1,5})\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Key:
    """A known key: its spelling and the steps that lead to it."""

    text: str
    steps: tuple[Step, ...]

    def find(self, data: Any) -> Any:
        """The value at this key in plain data; None when it is absent."""
        for step in self.steps:
            if isinstance(step, int):
                if not isinstance(data, list) or step >= len(data):
                    return None
            elif not isinstance(data, dict) or step not in data:
                return None
            data = data[step]
        return data


def parse_key(text: str) -> Key:
    """The key that ``text`` spells. Raises UsageError, with the nearest known key, when there is no such key."""
    head, _, rest = text.partition(".")
    match = _RANK.fullmatch(head)
    steps: list[Step] = ["rank", int(match[1])] if match else [head]
    section = "rank" if match else head
    if section not in config.SECTIONS:
        raise _unknown(text)
    if "." not in text:
        return Key(text, tuple(steps))
    if section == "rank" and not match:
        raise UsageError(f"which rank table? write rank[0].{rest}, rank[1].{rest}, ...")
    name, dot, below = rest.partition(".")
    if name not in _names(section) or (dot and ((section, name) != ("loader", "environment") or not below)):
        raise _unknown(text)
    return Key(text, (*steps, name, below) if dot else (*steps, name))


def _names(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(config.SECTIONS[section])]


def _unknown(text: str) -> UsageError:
    known = [
        f"{'rank[0]' if section == 'rank' else section}.{name}"
        for section in config.SECTIONS
        for name in _names(section)
    ]
    return UsageError(f"unknown key {text!r}{nearest(text, known) or all_of(known)}")
