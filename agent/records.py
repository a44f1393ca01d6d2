"""Strict JSON for frozen dataclasses: what is decoded has exactly the declared fields and types.

Supported field types: str, int, float, bool, None in a union, ``X | None``, Literal, ``tuple[X, ...]``,
fixed tuples, ``dict[str, X]``, nested dataclasses and unions of scalars. ``int`` is accepted where ``float`` is
declared, ``bool`` is never accepted as ``int``. Absent fields take their default; unknown fields are errors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """A value does not have the declared shape; the text starts with the path of the value."""


Decoder = Callable[[Any, str], Any]


def to_plain(value: Any) -> Any:
    """Turn a dataclass (or tuple, dict, scalar) into JSON-able plain data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(cls: type[T], data: Any, path: str = "$") -> T:
    """Build ``cls`` from plain data, or raise RecordError naming the path that is wrong."""
    result: T = _decoder(typing.cast("typing.Hashable", cls))(data, path)
    return result


def to_tagged(value: Any) -> bytes:
    """A dataclass as one JSON object that says which it is: its fields, and ``type``."""
    return json.dumps({"type": type(value).__name__, **to_plain(value)}).encode()


def from_tagged(kinds: Sequence[type[T]], data: bytes) -> T:
    """What ``to_tagged`` made of one of ``kinds``, which have no field ``type``. Raises ValueError."""
    try:
        body = json.loads(data)
    except RecursionError:
        raise RecordError("$: too deep") from None
    if not isinstance(body, dict):
        raise RecordError("$: expected a table")
    name = body.pop("type", "")
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise RecordError("$: no such message")
    return from_plain(kind, body)


@functools.cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(typing.cast("type", kind))
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(kind)
    if origin is typing.Literal:
        return _literal_decoder(typing.get_args(kind))
    if origin is tuple:
        return _tuple_decoder(typing.get_args(kind))
    if origin is dict:
        return _dict_decoder(typing.get_args(kind)[1])
    if kind in (str, int, float, bool, type(None)):
        return _scalar_decoder(kind)
    raise TypeError(f"records cannot carry {kind!r}")


def _scalar_decoder(kind: type) -> Decoder:
    name = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "null")

    def decode(value: Any, path: str) -> Any:
        if kind is float and type(value) is int and abs(value) < 1 << 1023:  # JSON knows larger numbers than floats
            return float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise RecordError(f"{path}: expected {name}, got {_shown(value)}")
        return value

    return decode


def _literal_decoder(allowed: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise RecordError(f"{path}: expected one of {', '.join(map(repr, allowed))}, got {_shown(value)}")
        return value

    return decode


def _union_decoder(kind: Any) -> Decoder:
    options = [_decoder(option) for option in typing.get_args(kind)]

    def decode(value: Any, path: str) -> Any:
        problems = []
        for option in options:
            try:
                return option(value, path)
            except RecordError as error:
                problems.append(error)
        # The deepest path is the most telling one: it belongs to the alternative that matched furthest.
        raise max(problems, key=lambda error: len(str(error).partition(": ")[0]))

    return decode


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])

        def decode(value: Any, path: str) -> Any:
            if not isinstance(value, list | tuple):
                raise RecordError(f"{path}: expected a list, got {_shown(value)}")
            return tuple([item(entry, f"{path}[{i}]") for i, entry in enumerate(value)])

        return decode
    items = [_decoder(argument) for argument in arguments]

    def decode_fixed(value: Any, path: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise RecordError(f"{path}: expected a list of {len(items)}, got {_shown(value)}")
        return tuple(item(entry, f"{path}[{i}]") for i, (item, entry) in enumerate(zip(items, value, strict=True)))

    return decode_fixed


def _dict_decoder(argument: Any) -> Decoder:
    item = _decoder(argument)

    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise RecordError(f"{path}: expected a table, got {_shown(value)}")
        return {key: item(entry, f"{path}.{key}") for key, entry in value.items()}

    return decode


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    fields = {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]

    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise RecordError(f"{path}: expected a table, got {_shown(value)}")
        for key in value:
            if key not in fields:
                raise RecordError(f"{path}: unknown field {key!r}")
        for name in required:
            if name not in value:
                raise RecordError(f"{path}: field {name!r} is missing")
        try:
            return cls(**{key: fields[key](entry, f"{path}.{key}") for key, entry in value.items()})
        except RecordError:
            raise
        except ValueError as error:
            raise RecordError(f"{path}: {error}") from None

    return decode


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
