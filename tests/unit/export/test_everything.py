"""The whole tree through the whole way."""

from __future__ import annotations

from tests.unit.export.roundtrip import roundtrip
from tests.unit.export.trees import Everything


def test_the_whole_tree_is_rebuilt() -> None:
    roundtrip(Everything)
