"""What rebuild refuses: other trees, and manifests that nobody should have written."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.trees import Helper, Mode, Weight, fill, fresh, simple
from weightcache import manifest
from weightcache.engine.rebuild import rebuild
from weightcache.errors import AttachFailed, ProtocolError
from weightcache.loader.export import Known, _check_places, _Storages
from weightcache.loader.walk import FoundModule, FoundTensor, Walk
from weightcache.manifest import ChangedScalar, Container, Manifest, Names, Record, Removed, Slot, Storage, Tensor


class Plain(nn.Module):
    """Two children, a list and a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.items = [torch.zeros(2)]
        self.helper = Helper(w=torch.zeros(2), mode=Mode.PLAIN)

    def load(self) -> None:
        fill(self)
        self.helper.w = fresh(3)
        self.helper.mode = Mode.PACKED


@pytest.fixture(scope="module")
def published() -> way.Published:
    return way.publish(Plain)


def bind(published: way.Published, model: nn.Module, **changes: Any) -> nn.Module:
    rebuild(model, dataclasses.replace(published.manifest, **changes), published.base)
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def changed(change: Callable[[Plain], Any]) -> nn.Module:
    model = on_meta(Plain)
    change(model)  # type: ignore[arg-type]
    return model


def test_the_unchanged_manifest_binds(published: way.Published) -> None:
    bind(published, on_meta(Plain))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: setattr(m, "a", nn.Conv1d(1, 1, 1, device="meta")),
            "the module a is a torch.nn.modules.conv.Conv1d",
        ),
        (lambda m: delattr(m, "a"), "this model has no module a"),
        (lambda m: setattr(m, "a", None), "this model has no module a"),
        (lambda m: m.add_module("c", nn.Linear(1, 1, device="meta")), "the set knows no module c"),
        (lambda m: m.a.register_buffer("more", torch.zeros(1, device="meta")), "no value for a.more"),
        (lambda m: setattr(m, "loose", torch.zeros(1, device="meta")), "no value for loose"),
        (lambda m: delattr(m, "items"), "cannot place a value inside a builtins.NoneType"),
        (lambda m: m.items.clear(), "IndexError"),
        (lambda m: setattr(m, "helper", None), "cannot place|AttributeError"),
        (lambda m: setattr(m.helper, "mode", 1), "this model has no tests.unit.export.trees.Mode"),
    ],
)
def test_another_tree_is_refused(published: way.Published, change: Callable[[Plain], Any], text: str) -> None:
    with pytest.raises(AttachFailed, match=text):
        bind(published, changed(change))


def test_the_class_of_the_root_counts(published: way.Published) -> None:
    class Plain2(Plain):
        pass

    with pytest.raises(AttachFailed, match="the module at the root is a"):
        bind(published, on_meta(Plain2))


def test_a_parameter_class_is_never_imported(published: way.Published) -> None:
    assert "wave" not in sys.modules
    tensors = tuple(row._replace(cls="wave.Wave_read") for row in published.manifest.tensors)
    with pytest.raises(AttachFailed, match="this model has no parameter class"):
        bind(published, on_meta(Plain), tensors=tensors)
    assert "wave" not in sys.modules


def test_a_parameter_class_that_is_loaded_is_found() -> None:
    def load(model: Any) -> None:
        model.w = Weight(fresh(2))

    way.roundtrip(simple(lambda m: m.register_parameter("w", None), load))


def test_attributes_come_from_the_parameter_that_is_replaced(published: way.Published) -> None:
    tensors = tuple(row._replace(attributes=("weight_loader",)) for row in published.manifest.tensors)
    with pytest.raises(AttachFailed, match="'weight_loader', which this model does not make"):
        bind(published, on_meta(Plain), tensors=tensors)


# -- hostile manifests -----------------------------------------------------------------------------------------------

HUGE = 1 << 62


def first(rows: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    return (rows[0]._replace(**changes), *rows[1:])


def weight(body: Manifest, **changes: Any) -> dict[str, Any]:
    """Change the first matrix among the weights."""
    index = next(i for i, row in enumerate(body.tensors) if row.kind == "parameter" and len(row.shape) == 2)
    rows = list(body.tensors)
    rows[index] = rows[index]._replace(**changes)
    return {"tensors": tuple(rows)}


def through_the_wire(body: Manifest) -> Manifest:
    return manifest.decode(manifest.encode(body))


def private_row(body: Manifest) -> int:
    return next(i for i, row in enumerate(body.tensors) if row.kind == "tensor")


@pytest.mark.parametrize(
    "change",
    [
        lambda b: {"storages": first(b.storages, offset=b.bytes)},
        lambda b: {"storages": first(b.storages, offset=-512)},
        lambda b: {"storages": first(b.storages, offset=8)},
        lambda b: {"storages": first(b.storages, bytes=HUGE)},
        lambda b: {"bytes": -1, "storages": (), "tensors": (), "slots": ()},
        lambda b: weight(b, storage=len(b.storages)),
        lambda b: weight(b, storage=-1),
        lambda b: weight(b, offset=-1),
        lambda b: weight(b, shape=(-4, 4)),
        lambda b: weight(b, stride=(-4, 1)),
        lambda b: weight(b, stride=(1,)),
        lambda b: weight(b, kind="module"),
        lambda b: {"modules": first(b.modules, paths=())},
        lambda b: {"slots": first(b.slots, module=len(b.modules))},
        lambda b: {"slots": first(b.slots, module=-1)},
        lambda b: {"slots": first(b.slots, tensor=len(b.tensors))},
        lambda b: {"slots": first(b.slots, tensor=-1)},
        lambda b: {"slots": first(b.slots, place="class")},
        lambda b: {"slots": first(b.slots, steps=())},
        lambda b: {"removed": (Removed(99, manifest.PARAMETER, "a", False),)},
        lambda b: {"removed": (Removed(0, "class", "a", False),)},
        lambda b: {"removed": (Removed(0, manifest.ATTRIBUTE, "__class__", False),)},
        lambda b: {"names": (Names(0, manifest.ATTRIBUTE, ("a",)),)},
        lambda b: {"names": (Names(0, manifest.PARAMETER, ("__dict__",)),)},
        lambda b: {"scalars": (ChangedScalar(0, (), 1),)},
        lambda b: {"scalars": (ChangedScalar(99, (("attr", "a"),), 1),)},
        lambda b: {"scalars": (ChangedScalar(0, (("attr", "a"),), ("class", "os")),)},
        lambda b: {"containers": (Container(0, (), "builtins.list", ()),)},
        *(
            lambda b, steps=steps: {"scalars": (ChangedScalar(0, steps, 1),)}
            for steps in (
                (("attr", "__class__"),),
                (("attr", "__dict__"), ("key", "a")),
                (("attr", "forward"), ("attr", "__globals__"), ("key", "torch")),
                (("attr", "helper"), ("attr", "__class__"), ("attr", "load")),
                (("call", "a"),),
                (("attr", 3),),
                (("item", "a"),),
                (("key", True),),
            )
        ),
    ],
)
def test_a_hostile_manifest_is_not_even_decoded(
    published: way.Published, change: Callable[[Manifest], dict[str, Any]]
) -> None:
    body = dataclasses.replace(published.manifest, **change(published.manifest))
    with pytest.raises(ProtocolError):
        through_the_wire(body)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: weight(b, shape=(HUGE, HUGE)),
        lambda b: weight(b, shape=(HUGE, HUGE), stride=(0, 0)),
        lambda b: weight(b, shape=(1 << 70, 1), stride=(0, 0)),
        lambda b: weight(b, shape=(2, 2), stride=(HUGE, 1)),
        lambda b: weight(b, offset=HUGE),
        lambda b: weight(b, dtype="nn"),
        lambda b: weight(b, dtype="load"),
        lambda b: weight(b, dtype="__name__"),
        lambda b: {
            "tensors": (
                *b.tensors[: private_row(b)],
                b.tensors[private_row(b)]._replace(shape=(1 << 40,), stride=(1,)),
                *b.tensors[private_row(b) + 1 :],
            )
        },
        lambda b: {"slots": first(b.slots, steps=(("attr", "_parameters"),))},
        lambda b: {"slots": first(b.slots, steps=(("attr", "_buffers"), ("key", "x")))},
        lambda b: {"slots": first(b.slots, steps=(("attr", "forward"), ("attr", "func")))},
        lambda b: {"slots": first(b.slots, steps=(("attr", "T_destination"), ("attr", "x")))},
        lambda b: {"slots": first(b.slots, tensor=-1, external="target:0")},
        lambda b: {"slots": first(b.slots, tensor=-1, external="target:x")},
        lambda b: {"slots": first(b.slots, tensor=-1, external="target:-1")},
        lambda b: {"removed": (Removed(0, manifest.ATTRIBUTE, "_modules", False),)},
        lambda b: {"removed": (Removed(0, manifest.ATTRIBUTE, "_parameters", True),)},
        lambda b: {"scalars": (ChangedScalar(0, (("attr", "_forward_hooks"),), 1),)},
        lambda b: {"scalars": (ChangedScalar(0, (("attr", "training"), ("attr", "real")), 1),)},
        lambda b: {"scalars": (ChangedScalar(0, (("attr", "d"),), ("dtype", "nn")),)},
        lambda b: {"scalars": (ChangedScalar(0, (("attr", "d"),), ("enum", "os:X")),)},
        lambda b: {"containers": (Container(0, (("attr", "d"),), "tests.unit.export.trees.Helper", ()),)},
        lambda b: {"records": (Record(0, (("attr", "d"),), "triton_kernels.no.Such"),)},
        lambda b: {"records": (Record(0, (("attr", "_buffers"),), "", 0, (("attr", "a"),)),)},
        lambda b: {"modules": first(b.modules, external="target:a")},
        lambda b: {"modules": (*b.modules, manifest.Module(("x.y.z",), "torch.nn.Module"))},
        lambda b: {"modules": (*b.modules, manifest.Module(("forward",), "builtins.method"))},
    ],
)
def test_a_hostile_manifest_does_not_bind(
    published: way.Published, change: Callable[[Manifest], dict[str, Any]]
) -> None:
    body = through_the_wire(dataclasses.replace(published.manifest, **change(published.manifest)))
    with pytest.raises(AttachFailed):
        rebuild(on_meta(Plain), body, published.base)


def test_no_step_reaches_the_class(published: way.Published) -> None:
    """What only the class has (methods, properties, defaults) is not found by a step."""
    scalars = (ChangedScalar(0, (("attr", "load"), ("attr", "marked")), 1),)
    with pytest.raises(AttachFailed):
        bind(published, on_meta(Plain), scalars=scalars)
    assert not hasattr(Plain.load, "marked")


def test_a_negative_external_tensor_is_no_tensor_from_the_end(published: way.Published) -> None:
    attached = way.attach(published, Plain)
    slots = first(published.manifest.slots, tensor=-1, external="target:-1")
    body = dataclasses.replace(published.manifest, slots=slots)
    with pytest.raises(AttachFailed, match="needs tensor -1 of the set 'target'"):
        rebuild(on_meta(Plain), body, published.base, {"target": attached.rebuilt})


def test_a_set_without_bytes() -> None:
    way.roundtrip(simple(lambda m: setattr(m, "n", 1), lambda m: setattr(m, "n", 2)))


# -- host tensors beside device weights ------------------------------------------------------------------------------


def host_rows(*tensors: torch.Tensor) -> tuple[tuple[Tensor, ...], tuple[bytes, ...]]:
    """Rows of host tensors in a set for another device: they travel inside the manifest."""
    root = nn.Module()
    found = [FoundTensor(0, manifest.ATTRIBUTE, (("attr", f"t{i}"),), t) for i, t in enumerate(tensors)]
    loaded = Walk(modules=[FoundModule(root, ("",))], tensors=found)
    storages = _Storages(loaded, torch.device("cuda"), None)
    assert storages.size == 0
    return storages.tensor_rows({})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4),
        torch.arange(12.0).view(3, 4).t()[1:],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(4, 0),
        torch.zeros(0),
        torch.ones(3).expand(2, 3),
        torch.arange(4.0).to(torch.float8_e4m3fn),
    ],
)
def test_a_host_tensor_travels_by_value(tensor: torch.Tensor) -> None:
    rows, inline = host_rows(torch.zeros(1), tensor)
    slots = tuple(Slot(0, manifest.ATTRIBUTE, (("attr", f"t{i}"),), i) for i in range(2))
    modules = (manifest.Module(("",), "torch.nn.modules.module.Module"),)
    body = through_the_wire(Manifest(0, (), inline, rows, modules, slots, (), ()))
    model = nn.Module()
    rebuild(model, body, torch.empty(0, dtype=torch.uint8))
    result = model.t1
    assert result.shape == tensor.shape
    assert result.dtype == tensor.dtype
    assert result.contiguous().view(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    result.zero_()  # it belongs to the engine


def test_another_device_of_the_same_kind_is_refused() -> None:
    class Elsewhere:
        device = torch.device("cuda", 1)

    loaded = Walk(modules=[FoundModule(nn.Module(), ("",))])
    loaded.tensors.append(FoundTensor(0, manifest.ATTRIBUTE, (("attr", "w"),), Elsewhere()))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="the tensor w is on cuda:1 and this set's device is cuda:0"):
        _check_places(loaded, torch.device("cuda", 0))


def test_storage_rows_say_who_may_write(published: way.Published) -> None:
    shared = [row for row in published.manifest.storages if row.shared]
    assert len(shared) == 3
    assert published.manifest.private_bytes == sum(row.bytes for row in published.manifest.storages) - sum(
        row.bytes for row in shared
    )
    assert all(isinstance(row, Storage) for row in shared)
    assert isinstance(published.exported.known("target"), Known)
