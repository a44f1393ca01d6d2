"""The tree of errors is what its own page says."""

from __future__ import annotations

import re

import pytest

from weightcache import errors
from weightcache.errors import WeightcacheError, from_code, tree

DRAWN = re.compile(r"^\s+([│├└─ ]*)(\w+)\s+([\w-]+)\s+(\d+)(?:\s+\(.*\))?$")


def drawn() -> list[tuple[int, str, str, int]]:
    """(depth, class, code, exit status) of each line of the drawing."""
    rows = [found for line in (errors.__doc__ or "").splitlines() if (found := DRAWN.match(line))]
    return [(len(row[1]) // 4, row[2], row[3], int(row[4])) for row in rows]


def test_the_drawing_is_the_tree() -> None:
    expected = []

    def visit(cls: type[WeightcacheError], depth: int) -> None:
        expected.append((depth, cls.__name__, cls.code, cls.exit_status))
        for child in cls.__subclasses__():
            visit(child, depth + 1)

    visit(WeightcacheError, 0)
    assert drawn() == expected


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in tree()]
    assert len(codes) == len(set(codes)) > 20


@pytest.mark.parametrize("cls", list(tree()), ids=lambda cls: cls.__name__)
def test_a_code_finds_its_class(cls: type[WeightcacheError]) -> None:
    error = from_code(cls.code, "one sentence")
    assert type(error) is cls
    assert (error.message, str(error)) == ("one sentence", "one sentence")
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.code)
    assert 0 < cls.exit_status < 126
    assert cls.__doc__


def test_an_unknown_code_is_a_plain_error() -> None:
    assert type(from_code("none", "x")) is WeightcacheError
