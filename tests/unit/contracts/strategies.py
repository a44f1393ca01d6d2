"""Hypothesis strategies for everything that travels."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from hypothesis import strategies as st

from weightcache import manifest
from weightcache.manifest import Manifest


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values(arguments[1]), max_size=3)
    return {
        str: st.text(max_size=8),
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
    }[kind]


names = st.text(max_size=6).filter(lambda name: not manifest.is_reserved(name))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attr"), names),
        st.tuples(st.just("item"), st.integers(0, 9)),
        st.tuples(st.just("key"), st.one_of(names, st.integers())),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.tuples(st.just("dtype"), names),
    st.tuples(st.just("enum"), names),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest whose references hold."""
    sizes = draw(st.lists(st.integers(0, 5000), max_size=4))
    storages, end = [], 0
    for size in sizes:
        storages.append(manifest.Storage(end, size, draw(st.booleans())))
        end += -(-size // manifest.ALIGNMENT) * manifest.ALIGNMENT
    inline = tuple(draw(st.lists(st.binary(max_size=20), max_size=3)))
    tensors = []
    for _ in range(draw(st.integers(0, 4)) if storages or inline else 0):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        tensors.append(
            manifest.Tensor(
                draw(st.integers(-len(inline), len(storages) - 1)),
                draw(st.integers(0, 9)),
                shape,
                tuple(draw(st.integers(0, 9)) for _ in shape),
                draw(names),
                draw(st.sampled_from(["parameter", "tensor"])),
                draw(names),
                draw(st.booleans()),
                tuple(draw(st.lists(names, max_size=2))),
            )
        )
    modules = tuple(
        manifest.Module(tuple(draw(st.lists(names, min_size=1, max_size=3))), draw(names), draw(names))
        for _ in range(draw(st.integers(1, 3)))
    )
    module = st.integers(0, len(modules) - 1)
    tables = st.sampled_from([manifest.PARAMETER, manifest.BUFFER])
    slots = [
        manifest.Slot(draw(module), draw(st.sampled_from(manifest.PLACES)), draw(steps), -1, "target:1"),
        *(
            manifest.Slot(draw(module), draw(st.sampled_from(manifest.PLACES)), draw(steps), index)
            for index in range(len(tensors))
        ),
    ]
    few: Any = st.integers(0, 2)
    return Manifest(
        end,
        tuple(storages),
        inline,
        tuple(tensors),
        modules,
        tuple(slots),
        tuple(manifest.Removed(draw(module), draw(tables), draw(names), draw(st.booleans())) for _ in range(draw(few))),
        tuple(manifest.ChangedScalar(draw(module), draw(steps), draw(scalars)) for _ in range(draw(few))),
        tuple(
            manifest.Container(
                draw(module), draw(steps), draw(names), tuple(draw(st.lists(st.one_of(names, st.integers()))))
            )
            for _ in range(draw(few))
        ),
        tuple(
            manifest.Names(draw(module), draw(tables), tuple(draw(st.lists(names, max_size=3))))
            for _ in range(draw(few))
        ),
        (
            manifest.Record(draw(module), draw(steps), "triton_kernels.tensor.Tensor"),
            manifest.Record(draw(module), draw(steps), "", draw(module), draw(steps)),
        )[: draw(few)],
        tuple(
            manifest.Switch(*draw(st.sampled_from(manifest.SWITCHES)), draw(names), draw(scalars))
            for _ in range(draw(few))
        ),
    )
