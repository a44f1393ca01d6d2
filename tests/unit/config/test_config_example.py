"""docs/weightcache.toml shows every key with its default, and loads as it stands and with every key uncommented."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

from weightcache import config

EXAMPLE = Path(__file__).parents[3] / "docs/weightcache.toml"


def uncommented() -> str:
    return re.sub(r"(?m)^#(?=[\[a-z])", "", EXAMPLE.read_text())


def test_it_loads_as_it_stands() -> None:
    assert config.load(EXAMPLE) == config.Config(path=EXAMPLE)


def test_every_key_is_in_it() -> None:
    data = tomllib.loads(uncommented())
    assert list(data) == list(config.SECTIONS)
    for name, cls in config.SECTIONS.items():
        table = data[name][0] if name == "rank" else data[name]
        assert list(table) == [field.name for field in dataclasses.fields(cls)]


def test_uncommented_it_loads_and_shows_the_defaults() -> None:
    shown, defaults = config.parse(uncommented(), EXAMPLE), config.Config()
    assert dataclasses.replace(shown.agent, runtime_dir=None) == defaults.agent
    assert dataclasses.replace(shown.loader, command=(), environment={}) == defaults.loader
    assert shown.memory == defaults.memory
    assert shown.policy == defaults.policy
    assert shown.exporter == defaults.exporter
