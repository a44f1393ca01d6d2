"""The manifest: any that holds together survives, and every reference is checked."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.contracts.strategies import manifests
from weightcache import manifest
from weightcache.columns import Numbers
from weightcache.errors import ProtocolError
from weightcache.manifest import Manifest, decode, encode, is_reserved


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(manifests())
def test_any_manifest_survives(body: Manifest) -> None:
    again = decode(encode(body))
    assert again == body
    assert encode(again) == encode(body)
    assert again.private_bytes == sum(row.bytes for row in body.storages if not row.shared)


SMALL = Manifest(
    bytes=1024,
    storages=(manifest.Storage(0, 100, True), manifest.Storage(512, 8, False)),
    inline=(b"abc",),
    tensors=(
        manifest.Tensor(0, 0, (5, 5), (5, 1), "float32", "parameter", "torch.nn.Parameter", False, ("a",)),
        manifest.Tensor(-1, 0, (3,), (1,), "uint8", "tensor", "torch.Tensor", False, ()),
    ),
    modules=(manifest.Module(("", "x"), "a.B"),),
    slots=(manifest.Slot(0, "parameter", (("attr", "w"),), 0), manifest.Slot(0, "attribute", (("attr", "t"),), 1)),
    removed=(manifest.Removed(0, "buffer", "b", True),),
    scalars=(manifest.ChangedScalar(0, (("attr", "h"), ("key", 3)), ("dtype", "int8")),),
    containers=(manifest.Container(0, (("attr", "c"),), "builtins.dict", ("a", 1)),),
    names=(manifest.Names(0, "buffer", ("b",)),),
    records=(
        manifest.Record(0, (("attr", "r"),), "triton_kernels.tensor.Tensor"),
        manifest.Record(0, (("attr", "s"),), "", 0, (("attr", "r"),)),
    ),
    switches=(manifest.Switch(*manifest.SWITCHES[0], "split_k", 1),),
)


def plain() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(SMALL))
    return body


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in places(item, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, item in enumerate(value) for place in places(item, (*path, index))]
    return found


def replaced(body: Any, path: tuple[Any, ...], new: Any) -> Any:
    holder = body
    for step in path[:-1]:
        holder = holder[step]
    if new is DELETE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return body


DELETE = object()


def test_the_small_one_is_fine() -> None:
    assert decode(json.dumps(plain()).encode()) == SMALL


@pytest.mark.parametrize("new", [None, -(2**70), {"a": 1}, [[[]]], 1.5, "\0", DELETE, True], ids=str)
def test_a_wrong_value_anywhere_is_an_error_or_harmless(new: Any) -> None:
    """Only ProtocolError may come out, and a reference never leaves its table."""
    for path in places(plain()):
        try:
            body = decode(json.dumps(replaced(plain(), path, new)).encode())
        except ProtocolError:
            continue
        assert all(0 <= slot.tensor < len(body.tensors) or slot.external for slot in body.slots)
        assert all(row.offset + row.bytes <= body.bytes for row in body.storages)
        for row in (*body.slots, *body.removed, *body.scalars, *body.containers, *body.names, *body.records):
            assert 0 <= row.module < len(body.modules)
        assert all(manifest.is_record(row.cls) or 0 <= row.of < len(body.modules) for row in body.records)
        for row in (*body.slots, *body.scalars, *body.containers, *body.records):
            assert row.steps
            assert not any(kind == "attr" and is_reserved(str(step)) for kind, step in row.steps)


@pytest.mark.parametrize("path", places(plain()), ids=lambda path: ".".join(map(str, path)))
def test_a_table_in_place_of_anything_is_refused(path: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(json.dumps(replaced(plain(), path, {"x": 1})).encode())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.binary(max_size=200) | st.recursive(st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_garbage(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("schema", [0, 3, 5, None, "4"])
def test_another_schema_says_so(schema: Any) -> None:
    with pytest.raises(ProtocolError, match=r"a manifest of schema .*; this version reads 4"):
        decode(json.dumps(plain() | {"schema": schema}).encode())


def numbers(letter: str, *values: int) -> str:
    return letter + base64.b64encode(struct.pack(f"<{len(values)}{letter}", *values)).decode()


def test_what_repeats_is_written_once() -> None:
    body = replace(SMALL, slots=(*SMALL.slots, *SMALL.slots))
    written = json.loads(encode(body))["slots"]
    assert written[1] == [["parameter", "attribute"], numbers("B", 0, 1, 0, 1)]
    assert written[2] == [[[["attr", "w"]], [["attr", "t"]]], numbers("B", 0, 1, 0, 1)]
    assert decode(encode(body)) == body


def test_lists_are_written_as_one() -> None:
    body = replace(SMALL, modules=(*SMALL.modules, manifest.Module(("y",), "a.B"), manifest.Module(("z", "w"), "a.B")))
    assert json.loads(encode(body))["modules"][0] == [["", "x", "y", "z", "w"], numbers("B", 2, 1, 2)]
    assert decode(encode(body)) == body


@pytest.mark.parametrize("rows", [0, 1, 2, 300])
def test_any_number_of_rows(rows: int) -> None:
    body = replace(SMALL, modules=tuple(manifest.Module((f"m{row}",), f"a.{row % 7}") for row in range(max(rows, 1))))
    body = replace(body, slots=SMALL.slots[:1] * rows)
    assert decode(encode(body)) == body


@pytest.mark.parametrize(
    ("value", "letter"),
    [
        (0, "B"), (255, "B"), (-1, "b"), (-128, "b"), (256, "H"), (-129, "h"), (65535, "H"), (65536, "I"),
        (-40000, "i"), (1 << 32, "Q"), ((1 << 64) - 1, "Q"), (-1 << 31, "i"), (-(1 << 31) - 1, "q"), (-1 << 63, "q"),
    ],
)  # fmt: skip
def test_numbers_take_as_few_bytes_as_they_need(value: int, letter: str) -> None:
    written = Numbers().fold((value,))
    assert written == numbers(letter, value)
    assert Numbers().unfold(written) == (value,)


@pytest.mark.parametrize("values", [(1 << 64,), (-1, 1 << 63), (-(1 << 63) - 1,)])
def test_numbers_of_more_than_64_bits_are_not_written(values: tuple[int, ...]) -> None:
    with pytest.raises(struct.error):
        Numbers().fold(values)


@pytest.mark.parametrize(
    "column",
    ["", "B", "A" + numbers("B", 0, 0)[1:], numbers("f", 0, 0), numbers("B", 0, 0)[:-1], numbers("B", 0), "HAAAA",
     "B@@", "B\u00e4", numbers("b", 0, -1), numbers("B", 0, 1), numbers("B", 0, 0, 0), [0, 0], 0, None],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_none_are_refused(column: Any) -> None:
    """Where two rows name the only module there is."""
    body = plain()
    body["slots"][0] = numbers("B", 0, 0)
    decode(json.dumps(body).encode())
    body["slots"][0] = column
    with pytest.raises(ProtocolError):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    "column",
    [
        [["attribute"], numbers("b", 0, -1)],
        [["attribute"], numbers("b", 0, 0)],
        [["attribute"], numbers("B", 0, 1)],
        [["attribute"], numbers("B", 0)],
        [["attribute"], numbers("B", 0, 0, 0)],
        [["attribute"], numbers("B", 0, 0), []],
        [["attribute"], [0, 0]],
        [["attribute"]],
        [["attribute", 1], numbers("B", 0, 0)],
        ["attribute", numbers("B", 0, 0)],
        [["attribute"], "00"],
        ["attribute", "attribute"],
        [["elsewhere"], numbers("B", 0, 0)],
    ],
    ids=str,
)
def test_a_column_that_does_not_unfold_is_refused(column: Any) -> None:
    body = plain()
    body["slots"][1] = [["attribute"], numbers("B", 0, 0)]
    decode(json.dumps(body).encode())
    body["slots"][1] = column
    with pytest.raises(ProtocolError):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    "column",
    [
        [["", "x"], numbers("B", 1)],
        [["", "x"], numbers("B", 3)],
        [["", "x"], numbers("B", 1, 1)],
        [["", "x"], numbers("b", 2)],
        [["", "x"], numbers("B", 2, 0)],
        [["", 1], numbers("B", 2)],
        [[], numbers("B", 0)],
        [["", "x"], [2]],
        [["", "x"]],
        ["x", numbers("B", 1)],
    ],
    ids=str,
)
def test_lists_of_other_lengths_are_refused(column: Any) -> None:
    """The only module has two paths."""
    body = plain()
    assert body["modules"][0] == [["", "x"], numbers("B", 2)]
    body["modules"][0] = column
    with pytest.raises(ProtocolError):
        decode(json.dumps(body).encode())


def large(rows: int = 3) -> Manifest:
    """Tables of several rows, of which one can be made wrong."""
    tensor, slot = SMALL.tensors[0], SMALL.slots[0]
    return replace(SMALL, tensors=(tensor,) * rows, slots=(slot,) * rows)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize(
    ("table", "change", "text"),
    [
        ("tensors", {"storage": 2}, "a tensor without storage: Tensor.storage=2"),
        ("tensors", {"storage": -2}, "a tensor without storage: Tensor.storage=-2"),
        ("tensors", {"offset": -1}, "a tensor that starts before its storage: Tensor.storage=0, offset=-1"),
        ("tensors", {"shape": (5, -5)}, r"a tensor with an impossible shape: \(5, -5\), strides \(5, 1\)"),
        ("tensors", {"stride": (5,)}, r"a tensor with an impossible shape: \(5, 5\), strides \(5,\)"),
        ("tensors", {"kind": "module"}, "an unknown kind of tensor 'module'"),
        ("slots", {"module": 1}, "a row without module"),
        ("slots", {"module": -1}, "a row without module"),
        ("slots", {"place": "class"}, "an unknown place 'class'"),
        ("slots", {"steps": ()}, "an unknown place 'parameter'"),
        ("slots", {"tensor": 3}, "a slot without tensor: Slot.*tensor=3"),
        ("slots", {"tensor": -1}, "a slot without tensor: Slot.*tensor=-1"),
        ("slots", {"tensor": -2, "external": "target:0"}, "a slot without tensor: Slot.*tensor=-2"),
    ],
)
def test_one_wrong_row_among_others_is_named(table: str, change: dict[str, Any], text: str, row: int) -> None:
    body = large()
    rows = list(getattr(body, table))
    rows[row] = rows[row]._replace(**change)
    assert decode(encode(body)) == body
    with pytest.raises(ProtocolError, match=text):
        decode(encode(replace(body, **{table: tuple(rows)})))


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_nesting_is_no_crash(depth: int) -> None:
    with pytest.raises(ProtocolError):
        decode(b'{"schema": 4, "bytes": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("cls", ["builtins.int", "torch.nn.Module", "triton.kernels", "os"])
def test_only_records_are_made(cls: str) -> None:
    """A manifest is data: it chooses among classes that are nothing but their attributes."""
    body = replace(SMALL, records=(manifest.Record(0, (("attr", "r"),), cls),))
    with pytest.raises(ProtocolError, match="an object that cannot be made"):
        decode(encode(body))


@pytest.mark.parametrize("switch", [("os", "environ"), ("sys", "modules"), (manifest.SWITCHES[0][0], "other")])
def test_only_known_switches_are_set(switch: tuple[str, str]) -> None:
    with pytest.raises(ProtocolError, match="an unknown switch"):
        decode(encode(replace(SMALL, switches=(manifest.Switch(*switch, "a", 1),))))


@pytest.mark.parametrize(
    ("name", "reserved"),
    [("__class__", True), ("__dict__", True), ("____", True), ("__private", False), ("_a__", False), ("a", False)],
)
def test_reserved_names(name: str, reserved: bool) -> None:
    assert is_reserved(name) is reserved
