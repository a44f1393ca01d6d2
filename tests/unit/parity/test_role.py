"""What a comparison asks for, by SGLang's arguments."""

from __future__ import annotations

import pytest

from tests.models.kinds import KINDS
from weightcache.parity.role import adapters


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], []),
        (["--enable-lora"], []),
        (["--lora-paths", "a=/x", "--enable-lora"], ["a"]),
        (["--lora-paths", "a=/x", "/y/b", '{"lora_name": "c", "lora_path": "/z"}'], ["a", "/y/b", "c"]),
        (["--lora-paths"], []),
    ],
)
def test_every_adapter_is_asked(arguments: list[str], names: list[str]) -> None:
    assert list(adapters(arguments)) == names


def test_the_kind_with_an_adapter() -> None:
    assert list(adapters(KINDS["lora"].options)) == ["adapter"]
