"""The manifest: any that holds together survives, and every reference is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.contracts.strategies import manifests
from weightcache import manifest
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


@pytest.mark.parametrize("schema", [0, 2, 4, None, "3"])
def test_another_schema_says_so(schema: Any) -> None:
    with pytest.raises(ProtocolError, match=r"a manifest of schema .*; this version reads 3"):
        decode(json.dumps(plain() | {"schema": schema}).encode())


def test_what_repeats_is_written_once() -> None:
    body = replace(SMALL, slots=(*SMALL.slots, *SMALL.slots))
    written = json.loads(encode(body))["slots"]
    assert written[1] == [["parameter", "attribute"], [0, 1, 0, 1]]
    assert written[2] == [[[["attr", "w"]], [["attr", "t"]]], [0, 1, 0, 1]]
    assert decode(encode(body)) == body


@pytest.mark.parametrize(
    "column",
    [
        [["attribute"], [0, -1]],
        [["attribute"], [0, 1]],
        [["attribute"], [0, False]],
        [["attribute"], [0]],
        [["attribute"], [0, 0, 0]],
        [["attribute"], [0, 0], []],
        [["attribute"]],
        [["attribute", 1], [0, 0]],
        ["attribute", [0, 0]],
        [["attribute"], "00"],
        ["attribute", "attribute"],
        [["elsewhere"], [0, 0]],
    ],
    ids=str,
)
def test_a_column_that_does_not_unfold_is_refused(column: Any) -> None:
    body = plain()
    body["slots"][1] = [["attribute"], [0, 0]]
    decode(json.dumps(body).encode())
    body["slots"][1] = column
    with pytest.raises(ProtocolError):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_nesting_is_no_crash(depth: int) -> None:
    with pytest.raises(ProtocolError):
        decode(b'{"schema": 3, "bytes": ' + b"[" * depth + b"]" * depth + b"}")


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
