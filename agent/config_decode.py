"""Plain data of a TOML file as frozen dataclasses: unknown keys, wrong types and near misses each get one sentence.

This knows shapes only; what values make sense together is weightcache.config's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")

_SIZE = re.compile(r"\s*(\d{1,15})\s*(B|KiB|MiB|GiB|TiB)\s*", re.ASCII)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


class DecodeError(ValueError):
    """``text`` is wrong about ``key`` (a dotted path such as ``rank[1].gpu``; empty: the whole file)."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}" if key else text)
        self.key = key
        self.text = text


def decode(cls: type[T], table: Any, key: str) -> T:
    """Build the dataclass ``cls`` from a TOML table found at ``key``. Raises DecodeError."""
    if not isinstance(table, dict):
        raise DecodeError(key, f"expected a table, got {shown(table)}")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every caller passes a dataclass
    check_names(table, [field.name for field in fields], key)
    for field in fields:
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and field.name not in table:
            raise DecodeError(join(key, field.name), "this key is missing")
    return cls(**{name: _value(hints[name], entry, join(key, name)) for name, entry in table.items()})


def check_names(table: Mapping[str, Any], known: Iterable[str], key: str) -> None:
    """Refuse a key of ``table`` that is not ``known``, naming the nearest one."""
    known = list(known)
    for name in table:
        if name not in known:
            raise DecodeError(join(key, name), f"unknown key{nearest(name, known) or all_of(known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)``, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f' (did you mean "{close[0]}"?)' if close else ""


def all_of(known: Iterable[str]) -> str:
    """The known names, for a name that resembles none of them."""
    return f" (known here: {', '.join(known)})"


def join(key: str, name: str) -> str:
    """``key.name``; a name that is no bare TOML key is quoted, with control characters escaped."""
    name = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
    return f"{key}.{name}" if key else name


def shown(value: Any) -> str:
    """A short form of a wrong value, in TOML's spelling and safe to print on a terminal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    try:
        text = json.dumps(value) if isinstance(value, str) else ascii(value)
    except ValueError:  # 0xFF... of more digits than Python shows
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def parse_size(value: Any, key: str) -> int:
    """Bytes from a whole number, or from text such as ``"1GiB"``."""
    if type(value) is int:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise DecodeError(key, f'expected bytes as a whole number or text such as "1GiB", got {shown(value)}')
    return int(match[1]) * _UNITS[match[2]]


def _value(kind: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # Only "X | None" occurs, and TOML has no null: the key is there, so it is an X.
        return _value(next(option for option in arguments if option is not type(None)), value, key)
    if origin is typing.Annotated:
        return arguments[1](value, key)
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in arguments:
            near = nearest(value, arguments) if isinstance(value, str) else ""
            expected = " or ".join(f'"{option}"' for option in arguments)
            raise DecodeError(key, f"expected {expected}, got {shown(value)}{near}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise DecodeError(key, f'expected a list such as ["a", "b"], got {shown(value)}')
        return tuple(_value(arguments[0], entry, f"{key}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise DecodeError(key, f"expected a table, got {shown(value)}")
        return {name: _value(arguments[1], entry, join(key, name)) for name, entry in value.items()}
    return _scalar(kind, value, key)


def _scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is Path:
        return Path(_scalar(str, value, key))
    if kind is float:
        with contextlib.suppress(OverflowError):  # a whole number that is larger than any of these
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        raise DecodeError(key, f"expected a finite number, got {shown(value)}")
    if type(value) is not kind:
        name = {str: "text in quotes", int: "a whole number", bool: "true or false"}[kind]
        raise DecodeError(key, f"expected {name}, got {shown(value)}")
    if kind is str and "\0" in value:
        raise DecodeError(key, "text may not contain a NUL character")
    return value
