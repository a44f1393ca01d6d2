"""docs/operations.md says what the code does, where that can be compared."""

from __future__ import annotations

import re

from tests.support.environments import REPOSITORY
from weightcache.monitor.families import FAMILIES, RANK
from weightcache.server.journal import MESSAGE_IDS
from weightcache.server.states import State

PAGE = (REPOSITORY / "docs" / "operations.md").read_text()


def test_every_event_is_in_the_table_with_its_id() -> None:
    rows = re.findall(r"^\| ([a-z-]+) \| ([0-9a-f]{32}) \|", PAGE, re.MULTILINE)
    assert dict(rows) == dict(MESSAGE_IDS)
    assert [name for name, _ in rows] == list(MESSAGE_IDS)


def test_every_state_is_in_the_table() -> None:
    table = PAGE.partition("## States")[2].partition("\n## ")[0]
    shown = set(re.findall(r"^\| ([a-z]+)", table, re.MULTILINE)) - {"state"}
    assert shown == {state.value for state in State} - {"stopped"}


def test_units_and_users_are_spelled_as_they_are_installed() -> None:
    units = {path.name for path in (REPOSITORY / "agent" / "units").iterdir()}
    named = set(re.findall(r"weightcache[a-z-]*@?\.(?:service|socket|target)", PAGE))
    assert named <= units


def test_every_metric_is_in_the_table_with_its_type_and_labels() -> None:
    table = PAGE.partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (weightcache_\w+) \| (\w+) \| ([\w, ]*) ?\| (.+) \|$", table, re.MULTILINE)
    suffixes = {"counter": "_total", "info": "_info"}
    assert sorted((name, kind, labels.strip()) for name, kind, labels, _ in rows) == sorted(
        (family.name + suffixes.get(family.type, ""), family.type, ", ".join(x for x in family.labels if x not in RANK))
        for family in FAMILIES
    )
    assert len({tells for *_, tells in rows}) == len(rows)


def test_every_metric_that_the_page_names_exists() -> None:
    series = {name for family in FAMILIES for name in (*family.series, family.name)}
    assert set(re.findall(r"\bweightcache_\w+", PAGE)) <= series
