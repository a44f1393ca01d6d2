"""Columns of a table as JSON values: how each is checked, written and read. A column of thousands takes a few calls.

What a column is for JSON:

    Numbers   one text: the letter that struct has for their size, and base64 of the numbers, little-endian
    Folded    [each different value once, Numbers of the index into them for each row]
    Lists     [the items of all rows in one list, Numbers of how many each row has]
    Values    one JSON value a row
"""

from __future__ import annotations

import base64
import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

R = TypeVar("R")

Decoder = Callable[[list[Any]], Iterable[Any]]
"""Checks JSON values and makes of them what the rows hold. Raises ValueError or TypeError."""

_BYTES = {"B": 1, "b": 1, "H": 2, "h": 2, "I": 4, "i": 4, "Q": 8, "q": 8}
"""Of a number, by its letter for struct; those of small letters have a sign."""

_COUNTS = "BHIQ"
"""Sizes of numbers that are never negative."""


class Column(Protocol):
    """One way to write a column."""

    def fold(self, values: tuple[Any, ...]) -> Any:
        """``values`` as JSON has them."""

    def unfold(self, column: Any) -> Sequence[Any]:
        """The values again, checked. Raises ValueError or TypeError."""


class Numbers:
    """Whole numbers of 64 bits."""

    def fold(self, values: tuple[Any, ...]) -> Any:
        """The narrowest numbers that hold all."""
        low, high = min(values, default=0), max(values, default=0)
        letter = next((letter for letter in _BYTES if _lowest(letter) <= low and high <= _highest(letter)), "q")
        return letter + base64.b64encode(struct.pack(f"<{len(values)}{letter}", *values)).decode()

    def unfold(self, column: Any, letters: str = "".join(_BYTES)) -> tuple[int, ...]:
        """The numbers, of one of the sizes ``letters``."""
        letter = one(str, column)[:1]
        if not letter or letter not in letters:
            raise ValueError(f"numbers of an unknown size {letter!r}")
        data = base64.b64decode(column[1:], validate=True)
        count, rest = divmod(len(data), _BYTES[letter])
        if rest:
            raise ValueError("a number that is cut off")
        return struct.unpack(f"<{count}{letter}", data)


def _lowest(letter: str) -> int:
    return -1 << 8 * _BYTES[letter] - 1 if letter.islower() else 0


def _highest(letter: str) -> int:
    return (1 << 8 * _BYTES[letter] - letter.islower()) - 1


_NUMBERS = Numbers()


class Folded(NamedTuple):
    """Values that repeat, which can be keys of a dictionary."""

    decoder: Decoder

    def fold(self, values: tuple[Any, ...]) -> Any:
        """Each different value once, in the order in which they come."""
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        return [list(places), _NUMBERS.fold(tuple(map(places.__getitem__, values)))]

    def unfold(self, column: Any) -> Sequence[Any]:
        """Rows that hold the same value hold one object."""
        values, packed = one(list, column)
        places = _NUMBERS.unfold(packed, _COUNTS)
        known = tuple(self.decoder(one(list, values)))
        if len(places) < 2:  # itemgetter wants one at least, and of one makes no tuple
            return [known[place] for place in places]
        found: tuple[Any, ...] = operator.itemgetter(*places)(known)
        return found


class Lists(NamedTuple):
    """Tuples of plain values, all different."""

    decoder: Decoder

    def fold(self, values: tuple[Any, ...]) -> Any:
        """One list of all their items."""
        return [list(itertools.chain.from_iterable(values)), _NUMBERS.fold(tuple(map(len, values)))]

    def unfold(self, column: Any) -> Sequence[Any]:
        """The tuples."""
        items, packed = one(list, column)
        lengths = _NUMBERS.unfold(packed, _COUNTS)
        if sum(lengths) != len(one(list, items)):
            raise ValueError("rows that have other items than there are")
        following = iter(self.decoder(items))
        return [(next(following),) if n == 1 else tuple(itertools.islice(following, n)) for n in lengths]


class Values(NamedTuple):
    """Anything; for tables of few rows."""

    decoder: Decoder

    def fold(self, values: tuple[Any, ...]) -> Any:
        """The same."""
        return values

    def unfold(self, column: Any) -> Sequence[Any]:
        """Each checked."""
        return list(self.decoder(one(list, column)))


def one(kind: type[R], value: Any) -> R:
    """``value``, which is of this type exactly. Raises TypeError."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def only(values: Iterable[Any], *kinds: type) -> None:
    """All values are of these types exactly; one pass in C. Raises TypeError."""
    if foreign := set(map(type, values)).difference(kinds):
        raise TypeError(f"expected {kinds[0].__name__}, got {foreign.pop().__name__}")


def of(*kinds: type) -> Decoder:
    """Values of these types."""

    def decode(column: list[Any]) -> Iterable[Any]:
        only(column, *kinds)
        return column

    return decode


def lists_of(*kinds: type) -> Decoder:
    """Lists of values of these types, as tuples."""

    def decode(column: list[Any]) -> Iterable[Any]:
        only(column, list)
        only(itertools.chain.from_iterable(column), *kinds)
        return map(tuple, column)

    return decode
