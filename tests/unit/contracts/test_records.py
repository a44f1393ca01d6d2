"""Strict records: what is decoded is exactly what was declared."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.contracts.strategies import values
from weightcache import protocol, records
from weightcache.engine.directive import Decision, Directive, PluginReady
from weightcache.fingerprint import Fingerprint
from weightcache.records import RecordError, from_plain, to_plain

RECORDS = (*protocol.Message.__args__, protocol.RankStatus, Fingerprint, Directive, Decision, PluginReady)


@dataclass(frozen=True)
class Inner:
    """Some fields."""

    number: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    """Every kind of field."""

    text: str
    flag: bool
    inner: Inner
    kind: Literal["a", "b", 1]
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (1, "x")
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    maybe: Inner | None = None
    either: int | str | None = None


GOOD: dict[str, Any] = {"text": "t", "flag": True, "inner": {"number": 1}, "kind": "a"}


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_every_record_survives_json(cls: type) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(values(cls))
    def check(record: Any) -> None:
        assert from_plain(cls, json.loads(json.dumps(to_plain(record)))) == record

    check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values(Outer))
def test_all_kinds_of_fields_survive(record: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(record)))) == record


def test_defaults_fill_what_is_absent() -> None:
    assert from_plain(Outer, GOOD) == Outer("t", True, Inner(1, 0.5), "a")


def test_whole_numbers_are_fine_as_fractions() -> None:
    value = from_plain(Inner, {"number": 1, "ratio": 2}).ratio
    assert (type(value), value) == (float, 2.0)


def test_numbers_that_no_fraction_can_be_are_refused() -> None:
    for number in (10**400, -(10**400)):
        with pytest.raises(RecordError, match="ratio: expected a number"):
            from_plain(Inner, {"number": 1, "ratio": number})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"surplus": 1}, "$: unknown field 'surplus'"),
        ({"text": None}, "$.text: expected text, got None"),
        ({"text": 1}, "$.text: expected text, got 1"),
        ({"flag": 1}, "$.flag: expected true or false, got 1"),
        ({"inner": {"number": True}}, "$.inner.number: expected a whole number, got True"),
        ({"inner": {"number": 1.0}}, "$.inner.number: expected a whole number, got 1.0"),
        ({"inner": {"number": 1, "ratio": False}}, "$.inner.ratio: expected a number, got False"),
        ({"inner": {"number": 1, "ratio": float("nan")}}, "$.inner.ratio: expected a number, got nan"),
        ({"inner": {"number": 1, "ratio": float("inf")}}, "$.inner.ratio: expected a number, got inf"),
        ({"inner": {}}, "$.inner: field 'number' is missing"),
        ({"inner": []}, "$.inner: expected a table, got []"),
        ({"kind": "c"}, "$.kind: expected one of 'a', 'b', 1, got 'c'"),
        ({"kind": True}, "$.kind: expected one of 'a', 'b', 1, got True"),
        ({"many": {}}, "$.many: expected a list, got {}"),
        ({"many": [{"number": 1}, {"number": "1"}]}, "$.many[1].number: expected a whole number, got '1'"),
        ({"pair": [1]}, "$.pair: expected a list of 2, got [1]"),
        ({"pair": [1, 2]}, "$.pair[1]: expected text, got 2"),
        ({"table": []}, "$.table: expected a table, got []"),
        ({"table": {"a": "1"}}, "$.table.a: expected a whole number, got '1'"),
        ({"maybe": {"number": "x"}}, "$.maybe.number: expected a whole number, got 'x'"),
        ({"either": True}, "$.either: expected"),
        ({"text": ["x" * 100]}, "$.text: expected text, got ['xxx"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecordError) as caught:
        from_plain(Outer, GOOD | change)
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(RecordError, match=f"field '{name}' is missing"):
        from_plain(Outer, {key: value for key, value in GOOD.items() if key != name})


def test_types_that_cannot_travel_are_no_surprise_at_run_time() -> None:
    @dataclass
    class Bad:
        value: set[int]

    with pytest.raises((TypeError, NameError)):
        from_plain(Bad, {"value": []})
    with pytest.raises(TypeError, match="cannot carry"):
        records._decoder(bytes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(json_values)
def test_nothing_but_record_errors_comes_out(data: Any) -> None:
    for cls in (Outer, protocol.Attach, protocol.RankReport):
        with pytest.raises(RecordError):
            from_plain(cls, data)


@dataclass(frozen=True)
class First:
    number: int


@dataclass(frozen=True)
class Second:
    text: str = ""


def test_a_tagged_record_says_which_it_is() -> None:
    for value in (First(3), Second("x")):
        assert records.from_tagged((First, Second), records.to_tagged(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"3", b"{}", b'{"type": "Third"}', b'{"type": ["First"], "number": 1}', b'{"type": "First"}',
        b'{"type": "First", "number": "1"}', b'{"type": "First", "number": 1, "more": 2}', b"[" * 100_000, b"\xff",
    ],
)  # fmt: skip
def test_what_is_no_tagged_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        records.from_tagged((First, Second), data)
