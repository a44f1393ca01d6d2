"""The rules of walk, export, pack and rebuild: for each, a check that holds, and how to take the rule away.

test_rules.py runs every check, and runs it again without its rule: then it must fail. So no rule can be lost unnoticed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.export import roundtrip as way
from tests.unit.export.trees import Helper, Mode, Pair, Rotary, Slotted, Weight, a_weight_loader, fill, fresh, simple
from weightcache import manifest
from weightcache.engine import rebuild as rebuilding
from weightcache.errors import AttachFailed, ExportRefused, UnplacedTensor, WeightcacheError
from weightcache.loader import changes, export as exporting, pack, walk
from weightcache.memory import views
from weightcache.memory.host import HostMemory, HostWritableRegion

Patch = pytest.MonkeyPatch
Check = Callable[[], None]
Break = Callable[[Patch], None]


@dataclass(frozen=True)
class Rule:
    """``check`` passes; after ``broken`` it fails."""

    check: Check
    broken: Break


RULES: dict[str, Rule] = {}


def rule(name: str, broken: Break) -> Callable[[Check], Check]:
    """Register a check under the name of its rule."""

    def register(check: Check) -> Check:
        assert name not in RULES
        RULES[name] = Rule(check, broken)
        return check

    return register


def carried(name: str, construct: Callable[[Any], None], load: Callable[[Any], None], broken: Break) -> None:
    """A rule whose check is that a small model is rebuilt."""

    def check() -> None:
        way.roundtrip(simple(construct, load))

    rule(name, broken)(check)


def refused(
    name: str,
    construct: Callable[[Any], None],
    load: Callable[[Any], None],
    error: type[WeightcacheError],
    text: str,
    broken: Break,
) -> None:
    """A rule whose check is that a small model is refused with a text that names the path."""

    def check() -> None:
        with pytest.raises(WeightcacheError) as caught:
            way.exported(simple(construct, load)())
        assert type(caught.value) is error
        assert text in str(caught.value)

    rule(name, broken)(check)


def replacing(owner: Any, name: str, value: Any) -> Break:
    return lambda patch: patch.setattr(owner, name, value)


def wrapping(owner: Any, name: str, wrapper: Callable[..., Any]) -> Break:
    """Replace ``owner.name`` by ``wrapper(original, *arguments)``."""

    def apply(patch: Patch) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        patch.setattr(owner, name, wrapped)

    return apply


def rows(name: str, change: Callable[[Any], Any]) -> Break:
    """Change every row of one kind as it is made."""
    return wrapping(manifest, name, lambda original, *args, **kwargs: change(original(*args, **kwargs)))


def without(table: str, keep: Callable[[Any], bool] = lambda row: False) -> Break:
    """Leave rows out of what loading changed."""
    return wrapping(changes.Changes, table, lambda original, self: [row for row in original(self) if keep(row)])


def not_visiting(skip: Callable[[object, str, tuple[Any, ...]], bool]) -> Break:
    def visit(original: Any, self: Any, value: object, place: str, steps: tuple[Any, ...]) -> None:
        if not skip(value, place, steps):
            original(self, value, place, steps)

    return wrapping(walk._Visitor, "visit", visit)


def not_searching(reason: str) -> Break:
    def later(original: Any, self: Any, value: object, place: str, steps: tuple[Any, ...], why: str) -> None:
        if why != reason:
            original(self, value, place, steps, why)

    return wrapping(walk._Visitor, "_later", later)


def nothing(model: Any) -> None:
    """Load nothing beyond the bytes."""


def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, **kwargs), requires_grad=False)


def put(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    """Set one attribute."""
    return lambda model: setattr(model, name, make())


def both(*parts: Callable[[Any], Any]) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        for part in parts:
            part(model)

    return run


# -- identity and memory ---------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Construction shares the rotary module only outside an engine, as process-wide caches may do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        self.a.rotary = Rotary()
        self.b.rotary = Rotary() if torch.get_default_device().type == "meta" else self.a.rotary

    def load(self) -> None:
        fill(self)


@rule(
    "shared-module",
    wrapping(
        walk,
        "find_modules",
        lambda original, model: [m._replace(paths=m.paths[:1]) for m in original(model)],
    ),
)
def check_shared_module() -> None:
    attached = way.roundtrip(Layers)
    assert attached.model.a.rotary is attached.model.b.rotary


def one_by_one(original: Any, self: Any, index: int, old: object) -> Any:
    self.tensors[index] = None
    return original(self, index, old)


carried(
    "tied-parameters",
    lambda m: both(put("a", lambda: parameter(3)), put("b", lambda: parameter(3)))(m),
    lambda m: setattr(m, "b", m.a),
    wrapping(rebuilding._Builder, "_tensor", one_by_one),
)
carried(
    "two-parameters-on-one-storage",
    put("a", lambda: parameter(6)),
    lambda m: setattr(m, "b", nn.Parameter(m.a.data[2:4], requires_grad=False)),
    replacing(exporting, "_memory_of", lambda tensor: (0, id(tensor))),
)
carried(
    "view-as-attribute-shares-memory",
    put("a", lambda: parameter(4, 6)),
    lambda m: setattr(m, "t", m.a.data.t()),
    replacing(exporting, "_memory_of", lambda tensor: (0, id(tensor))),
)
carried(
    "view-offset",
    put("a", lambda: parameter(4, 6)),
    lambda m: setattr(m, "slice", m.a.data[2:, 3:]),
    rows("Tensor", lambda row: row._replace(offset=0)),
)
carried(
    "view-stride",
    put("a", lambda: parameter(4, 6)),
    lambda m: setattr(m, "a", nn.Parameter(fresh(6, 4).t(), requires_grad=False)),
    rows("Tensor", lambda row: row._replace(stride=tuple(torch.empty(row.shape, device="meta").stride()))),
)
carried(
    "stride-zero",
    put("a", lambda: parameter(1)),
    lambda m: setattr(m, "wide", nn.Parameter(m.a.data.expand(50, 1), requires_grad=False)),
    rows("Tensor", lambda row: row._replace(stride=tuple(torch.empty(row.shape, device="meta").stride()))),
)
carried(
    "slice-of-a-larger-buffer",
    put("a", lambda: parameter(4)),
    lambda m: setattr(m.a, "data", fresh(1000)[300:304]),
    rows("Tensor", lambda row: row._replace(offset=0)),
)
carried(
    "dtype",
    put("a", lambda: parameter(4)),
    lambda m: setattr(m.a, "data", fresh(4).to(torch.float8_e4m3fn)),
    rows("Tensor", lambda row: row._replace(dtype="int8" if row.dtype == "float8_e4m3fn" else row.dtype)),
)
carried(
    "zero-size",
    put("a", lambda: parameter(3)),
    lambda m: setattr(m, "empty", nn.Parameter(torch.zeros(4, 0), requires_grad=False)),
    replacing(views, "extent", lambda shape, stride: 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))),
)
carried(
    "zero-dimensional",
    put("a", lambda: parameter(3)),
    lambda m: setattr(m, "scale", nn.Parameter(fresh(1)[0], requires_grad=False)),
    rows("Tensor", lambda row: row._replace(shape=row.shape or (1,), stride=row.stride or (1,))),
)
carried(
    "requires-grad",
    lambda m: both(put("a", lambda: nn.Parameter(torch.zeros(2))), put("b", lambda: torch.zeros(2)))(m),
    lambda m: m.b.requires_grad_(),
    rows("Tensor", lambda row: row._replace(requires_grad=False)),
)
carried(
    "parameter-class",
    put("a", lambda: Weight(torch.zeros(2))),
    nothing,
    replacing(rebuilding, "_parameter_class", lambda name, old: nn.Parameter),
)
carried(
    "parameter-attributes",
    put("a", lambda: Weight(torch.zeros(2), output_dim=0, weight_loader=a_weight_loader)),
    nothing,
    replacing(changes.Changes, "carried_attributes", lambda self: {}),
)
carried(
    "parameter-becomes-plain",
    put("a", lambda: Weight(torch.zeros(2), weight_loader=a_weight_loader)),
    lambda m: setattr(m, "a", nn.Parameter(m.a.data, requires_grad=False)),
    replacing(rebuilding, "_parameter_class", lambda name, old: type(old)),
)

# -- what is shared and what is private ------------------------------------------------------------------------------

carried(
    "buffers-are-private",
    lambda m: both(put("a", lambda: parameter(3)), lambda m: m.register_buffer("b", torch.zeros(3)))(m),
    lambda m: m._buffers.update(b=m.a.data),
    replacing(
        exporting, "_is_shared", lambda entries, _: any(isinstance(entry.tensor, nn.Parameter) for entry in entries)
    ),
)
carried(
    "plain-tensors-are-private",
    lambda m: both(put("a", lambda: parameter(3)), put("workspace", lambda: torch.zeros(3)))(m),
    nothing,
    replacing(exporting, "_is_shared", lambda entries, _: True),
)
carried(
    "weights-are-shared",
    put("a", lambda: parameter(3)),
    nothing,
    replacing(exporting, "_is_shared", lambda entries, _: False),
)
carried(
    "transient-buffers",
    lambda m: m.register_buffer("a", torch.zeros(3), persistent=False),
    lambda m: m.register_buffer("b", fresh(3), persistent=False),
    rows("Slot", lambda row: row._replace(place=row.place.removeprefix("transient-"))),
)
carried(
    "buffer-becomes-persistent",
    lambda m: m.register_buffer("a", torch.zeros(3), persistent=False),
    lambda m: both(lambda m: delattr(m, "a"), lambda m: m.register_buffer("a", fresh(3)))(m),
    rows("Slot", lambda row: row._replace(place=manifest.TRANSIENT_BUFFER)),
)

# -- where tensors sit -----------------------------------------------------------------------------------------------

carried("parameters", put("a", lambda: parameter(3)), nothing, not_visiting(lambda v, p, s: p == manifest.PARAMETER))
carried(
    "buffers",
    lambda m: m.register_buffer("a", torch.zeros(3)),
    nothing,
    not_visiting(lambda v, p, s: p == manifest.BUFFER),
)
carried(
    "attributes",
    put("a", lambda: torch.zeros(3)),
    lambda m: setattr(m, "w_kc", fresh(3)),
    not_visiting(lambda v, p, s: p == manifest.ATTRIBUTE and len(s) == 1),
)
carried(
    "lists",
    put("a", lambda: [torch.zeros(3)]),
    lambda m: m.a.__setitem__(0, fresh(3)),
    not_visiting(lambda v, p, s: isinstance(v, list)),
)
carried(
    "dictionaries",
    put("a", lambda: {"x": torch.zeros(3), 4: torch.zeros(3)}),
    lambda m: m.a.update({"x": fresh(3), 4: fresh(3)}),
    not_visiting(lambda v, p, s: isinstance(v, dict)),
)
carried(
    "tuples",
    put("a", lambda: (torch.zeros(3), (torch.zeros(1),))),
    lambda m: setattr(m, "a", (fresh(3), (fresh(1),))),
    not_visiting(lambda v, p, s: isinstance(v, tuple)),
)
carried(
    "named-tuples",
    put("a", lambda: Pair(torch.zeros(3), 1)),
    lambda m: setattr(m, "a", Pair(fresh(3), 2)),
    not_visiting(lambda v, p, s: isinstance(v, tuple)),
)
carried(
    "helper-objects",
    put("method", lambda: Helper(kernel=Helper(workspace=torch.zeros(3)))),
    lambda m: setattr(m.method.kernel, "workspace", fresh(4)),
    replacing(walk._Visitor, "_object", lambda self, value, place, steps: None),
)


def only_dictionaries(value: object) -> Any:
    return iter(list(getattr(value, "__dict__", {}).items()))


carried("slots", put("a", Slotted), lambda m: m.a.load(), replacing(walk, "_attributes", only_dictionaries))
carried(
    "unregistered-modules",
    put("hidden", lambda: [nn.Linear(2, 3)]),
    lambda m: fill(m.hidden[0]),
    not_visiting(lambda v, p, s: isinstance(v, nn.Linear)),
)

# -- names, containers and values ------------------------------------------------------------------------------------

carried("removed-names", put("a", lambda: parameter(3)), lambda m: delattr(m, "a"), without("removed"))
carried(
    "names-set-to-none",
    put("a", lambda: parameter(3)),
    lambda m: setattr(m, "a", None),
    without("removed", lambda row: not row.none),
)
carried(
    "removed-attributes",
    both(put("a", lambda: torch.zeros(3)), put("n", lambda: 1)),
    lambda m: both(lambda m: delattr(m, "a"), lambda m: delattr(m, "n"))(m),
    without("removed"),
)
carried(
    "parameter-becomes-a-none-attribute",
    put("a", lambda: parameter(3)),
    lambda m: both(lambda m: delattr(m, "a"), lambda m: setattr(m, "a", None))(m),
    without("scalars"),
)
carried(
    "order-of-names",
    both(put("a", lambda: parameter(3)), put("b", lambda: parameter(3))),
    lambda m: both(lambda m: delattr(m, "a"), lambda m: setattr(m, "a", parameter(2, 2)))(m),
    without("names"),
)
carried(
    "registered-none",
    put("a", lambda: parameter(3)),
    lambda m: both(lambda m: m.register_parameter("b", None), lambda m: m.register_buffer("c", None))(m),
    without("names"),
)
carried(
    "scalars-on-modules",
    both(put("a", lambda: 1), put("d", lambda: torch.float32)),
    lambda m: both(put("a", lambda: 2), put("b", lambda: "new"), put("d", lambda: torch.int8))(m),
    without("scalars", lambda row: len(row.steps) > 1),
)
carried(
    "scalars-on-helpers",
    put("h", lambda: Helper(a=1, k=Helper(ready=False))),
    lambda m: both(lambda m: vars(m.h).update(a=True, b=None), lambda m: setattr(m.h.k, "ready", True))(m),
    without("scalars", lambda row: row.steps[0] != ("attr", "h")),
)
carried(
    "scalars-on-tensors",
    put("w", lambda: Weight(torch.zeros(2), output_dim=0)),
    lambda m: vars(m.w).update(output_dim=1, format_ue8m0=True),
    without("scalars", lambda row: row.steps[0] != ("attr", "w")),
)
carried(
    "scalars-in-containers",
    put("c", lambda: [1, {"a": 1}, (1, 2)]),
    lambda m: setattr(m, "c", [2, {"a": 3}, (1, 4)]),
    without("scalars"),
)
carried(
    "scalars-that-are-no-number",
    put("c", lambda: float("nan")),
    put("c", lambda: 1.5),
    without("scalars"),
)
carried(
    "truth-is-no-number",
    put("c", lambda: 1),
    put("c", lambda: True),
    without("scalars"),
)
carried("enums", put("mode", lambda: Mode.PLAIN), put("mode", lambda: Mode.PACKED), without("scalars"))
carried(
    "made-containers",
    nothing,
    lambda m: setattr(m, "made", {"t": (fresh(2), [1, fresh(1)]), "s": torch.Size([2]), "e": [], "x": {1, 2}}),
    without("containers"),
)
carried(
    "resized-containers",
    lambda m: both(put("a", lambda: [1, 2, 3]), put("b", lambda: {"x": 1, "y": torch.zeros(1)}))(m),
    lambda m: both(lambda m: m.a.pop(), lambda m: m.b.pop("y"), lambda m: m.b.update(z=fresh(2)))(m),
    without("containers"),
)


def wrap_weights(model: Any) -> None:
    """As loading leaves MXFP4 experts: the weights in objects of the kernels' own, some of them shared."""
    layout = Helper(axis=1, shape=[2, 1])
    model.method.weight = Helper(data=fresh(3), shape=torch.Size([3]), layout=layout, dtype=torch.uint8, scale=None)
    model.method.parts = {"other": Helper(data=fresh(2), layout=layout)}
    model.again = model.method.weight


@rule("made-records", without("records"))
@rule("shared-records", without("records", keep=lambda row: row.cls))
def check_made_records() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "RECORD_PACKAGES", (__name__.partition(".")[0],))
        way.roundtrip(simple(put("method", lambda: Helper(weight=None)), wrap_weights))


@rule(
    "weights-in-records-are-shared", replacing(exporting, "_is_weight", lambda e, _: isinstance(e.tensor, nn.Parameter))
)
@rule("results-in-records-are-private", replacing(exporting, "_is_written", lambda entry: False))
def check_memory_of_records() -> None:
    """The kernels read weights and their scales, and write what is named as a result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "RECORD_PACKAGES", (__name__.partition(".")[0],))
        patch.setattr(manifest, "WEIGHT_RECORDS", (walk.class_name(Storage),))
        make = simple(put("method", lambda: Helper(weight=None)))
        published = way.publish(simple(put("method", lambda: Helper(weight=None)), wrap_storages))
        body = published.manifest
        shared = {
            ".".join(str(step) for _, step in slot.steps): body.storages[body.tensors[slot.tensor].storage].shared
            for slot in body.slots
        }
        assert shared == {
            "method.weight.storage.data": True,
            "method.weight.storage.scratch": False,
            "method.precision.weight_scale.storage.data": True,
            "method.precision.out_scale.storage.data": False,
            "method.precision.out_data.actual_scale": False,
            "method.workspace": False,
        }
        with torch.device("meta"):
            attached: Any = make()
        rebuilding.rebuild(attached, body, published.base)
        weight = attached.method.weight.storage.data
        original: Any = published.model
        assert torch.equal(weight, original.method.weight.storage.data)
        assert 0 <= weight.data_ptr() - published.base.data_ptr() < body.bytes
        assert not 0 <= attached.method.workspace.data_ptr() - published.base.data_ptr() < body.bytes


class Storage(Helper):
    """Stands for triton_kernels' class of this name."""


def wrap_storages(model: Any) -> None:
    """As loading leaves MXFP4 experts, and more than it does."""
    model.method.weight = Helper(storage=Storage(data=fresh(3), scratch=fresh(1)))
    model.method.precision = Helper(
        weight_scale=Helper(storage=Storage(data=fresh(2))),
        out_scale=Helper(storage=Storage(data=fresh(2))),
        out_data=Helper(actual_scale=fresh(1)),
    )
    model.method.workspace = fresh(4)


@rule("switches", replacing(exporting, "switches", lambda: iter(())))
def check_switches() -> None:
    """Loading sets one in a module of Python's, which an engine has without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "SWITCHES", ((__name__, "CONSTRAINTS"),))
        patch.setitem(CONSTRAINTS, "split_k", 1)
        make = simple(nothing)
        published = way.publish(make)
        patch.delitem(CONSTRAINTS, "split_k")
        way.attach(published, make).check()
        assert CONSTRAINTS.pop("split_k") == 1


CONSTRAINTS: dict[str, int] = {}


# -- what is refused -------------------------------------------------------------------------------------------------


def closing_over(value: object) -> Callable[[], object]:
    return lambda: value


UNBOUND = replacing(walk, "_held_by_code", lambda value: iter(()))
refused(
    "closures-fail-closed",
    put("f", lambda: closing_over([torch.zeros(1)])),
    nothing,
    UnplacedTensor,
    "the tensor f.value[0] cannot be rebuilt in an engine: it is bound inside a function",
    UNBOUND,
)
refused(
    "helpers-in-closures-fail-closed",
    put("f", lambda: closing_over(Helper(w=torch.zeros(1)))),
    nothing,
    UnplacedTensor,
    "f.value.w",
    UNBOUND,
)
refused(
    "partial-arguments-fail-closed",
    put("h", lambda: Helper(f=functools.partial(a_weight_loader, torch.zeros(1)))),
    nothing,
    UnplacedTensor,
    "h.f.args[0]",
    UNBOUND,
)
refused(
    "bound-methods-fail-closed",
    put("f", lambda: Holder(torch.zeros(1)).apply),
    nothing,
    UnplacedTensor,
    "f.__self__.held",
    UNBOUND,
)
refused(
    "defaults-fail-closed",
    put("f", lambda: defaulting(torch.zeros(1))),
    nothing,
    UnplacedTensor,
    "f.__defaults__[0]",
    UNBOUND,
)
refused(
    "sets-fail-closed",
    put("s", lambda: {torch.zeros(1)}),
    nothing,
    UnplacedTensor,
    "the tensor s[0] cannot be rebuilt in an engine: it is in a set",
    not_searching("it is in a set"),
)
refused(
    "tensor-attributes-fail-closed",
    put("w", lambda: Weight(torch.zeros(2), scale=torch.zeros(1))),
    nothing,
    UnplacedTensor,
    "the tensor w.scale cannot be rebuilt in an engine: it is an attribute of another tensor",
    not_searching("it is an attribute of another tensor"),
)
refused(
    "odd-keys-fail-closed",
    put("d", lambda: {(0, 1): torch.zeros(1)}),
    nothing,
    UnplacedTensor,
    "d['(0, 1)']",
    not_searching("its dictionary key is no plain value"),
)
refused(
    "reserved-names-fail-closed",
    put("h", lambda: Helper(__hidden__=torch.zeros(1))),
    nothing,
    UnplacedTensor,
    "h.__hidden__",
    not_searching("its name belongs to Python"),
)


def nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value


refused(
    "depth-fails-closed",
    put("deep", lambda: nested(20, torch.zeros(1))),
    nothing,
    UnplacedTensor,
    "it is nested too deeply",
    not_visiting(lambda v, p, s: len(s) > walk.MAX_DEPTH),
)
refused(
    "endless-depth-fails-closed",
    put("deep", lambda: nested(100, torch.zeros(1))),
    nothing,
    ExportRefused,
    "nested too deeply to be looked through",
    not_visiting(lambda v, p, s: len(s) > walk.MAX_DEPTH),
)
UNCHECKED = replacing(exporting, "_check_places", lambda loaded, device: None)
refused(
    "other-devices-fail-closed",
    nothing,
    lambda m: setattr(m, "a", torch.zeros(2, device="meta")),
    UnplacedTensor,
    "the tensor a is on meta",
    UNCHECKED,
)
refused(
    "sparse-tensors-fail-closed",
    put("a", lambda: torch.zeros(2, 2)),
    lambda m: setattr(m, "a", torch.eye(2).to_sparse()),
    UnplacedTensor,
    "the tensor a is not strided",
    UNCHECKED,
)
refused(
    "conjugate-views-fail-closed",
    put("a", lambda: torch.zeros(2)),
    lambda m: setattr(m, "a", torch.zeros(2, dtype=torch.complex64).conj()),
    UnplacedTensor,
    "the tensor a is a conjugate",
    UNCHECKED,
)


class Tagged(torch.Tensor):
    """A tensor class that no engine can make."""


refused(
    "tensor-classes-fail-closed",
    put("a", lambda: torch.zeros(2)),
    lambda m: setattr(m, "a", torch.zeros(2).as_subclass(Tagged)),
    UnplacedTensor,
    "Tagged",
    UNCHECKED,
)
refused(
    "removed-modules",
    put("child", lambda: nn.Linear(2, 2)),
    lambda m: setattr(m, "child", None),
    ExportRefused,
    "loading removed the module child",
    replacing(changes.Changes, "_check_modules", lambda self: None),
)
refused(
    "replaced-modules",
    put("child", lambda: nn.Linear(2, 2)),
    put("child", lambda: nn.Linear(2, 2)),
    ExportRefused,
    "loading removed the module child",
    replacing(changes.Changes, "_check_modules", lambda self: None),
)
refused(
    "added-modules",
    nothing,
    put("child", lambda: nn.Linear(2, 2)),
    ExportRefused,
    "loading added the module child",
    replacing(changes.Changes, "_check_modules", lambda self: None),
)


class Aliased(nn.Module):
    """One module under two names, of which loading drops one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(2, 2)

    def load(self) -> None:
        self.b = None


@rule("removed-module-paths", replacing(changes.Changes, "_check_modules", lambda self: None))
def check_removed_module_paths() -> None:
    with pytest.raises(ExportRefused, match="loading removed the module b"):
        way.exported(Aliased())


UNCHECKED_OBJECTS = replacing(changes.Changes, "_check_objects", lambda self: None)
for where, construct, load, path in (
    ("set", nothing, put("method", lambda: Helper(a=1)), "loading set method to a tests.unit.export.trees.Helper"),
    ("replaced", put("method", lambda: Slotted()), put("method", lambda: Helper(a=1)), "loading set method to a"),
    ("below", put("h", lambda: Helper(k=None)), lambda m: setattr(m.h, "k", Helper()), "loading set h.k to a"),
    ("function", nothing, put("call", lambda: a_weight_loader), "loading set call to a"),
    ("emptied", put("h", lambda: Helper(k=1)), lambda m: delattr(m.h, "k"), "loading removed h.k"),
    ("on-tensor", put("w", lambda: Weight(torch.zeros(1))), lambda m: setattr(m.w, "f", a_weight_loader), "set w.f to"),
):
    refused(f"opaque-objects-{where}", construct, load, ExportRefused, path, UNCHECKED_OBJECTS)

UNCHECKED_ALIASES = replacing(changes.Changes, "_check_aliases", lambda self: None)
refused(
    "objects-made-one",
    both(put("a", lambda: Helper(n=1)), put("b", lambda: Helper(n=1))),
    lambda m: setattr(m, "b", m.a),
    ExportRefused,
    "loading set b to the object at a",
    UNCHECKED_ALIASES,
)


def share(model: Any) -> None:
    model.a = model.b = [1]


refused(
    "objects-made-two",
    share,
    put("b", lambda: [2]),
    ExportRefused,
    "loading gave b an object of its own",
    UNCHECKED_ALIASES,
)
refused(
    "references-to-modules",
    both(put("a", lambda: nn.Linear(1, 1)), put("refs", lambda: [1])),
    lambda m: m.refs.__setitem__(0, m.a),
    ExportRefused,
    "loading set refs[0] to the object at a",
    UNCHECKED_ALIASES,
)
for what, before, after in (
    ("bytes", b"a", b"b"),
    ("enum", None, Mode.PACKED),
    ("device", torch.device("cpu"), torch.device("meta")),
):
    refused(
        f"values-that-cannot-travel-{what}",
        put("x", lambda value=before: value),
        put("x", lambda value=after: value),
        ExportRefused,
        "loading set x to a",
        replacing(changes.Changes, "scalars", lambda self: iter(())),
    )
refused(
    "odd-keys-in-changed-dictionaries",
    put("d", lambda: {(0, 1): 1}),
    lambda m: m.d.update({(0, 1): 2}),
    ExportRefused,
    "loading set d to a builtins.dict",
    replacing(changes.Changes, "containers", lambda self: iter(())),
)

# -- packing ---------------------------------------------------------------------------------------------------------


class Dirty(HostWritableRegion):
    """Fresh memory that is not zero, as a GPU's is."""

    def extend(self, size: int) -> None:
        start = self.size
        super().extend(size)
        self.bytes_at(start, size).fill_(0xEE)


@rule("padding-is-zeroed", replacing(pack.manifest, "ALIGNMENT", 1))
def check_padding() -> None:
    done = _exported_aligned(simple(both(*(put(f"p{n}", lambda n=n: parameter(n)) for n in (1, 5, 129, 300))))())
    region = Dirty(way.ARENA, HostMemory().free_bytes)
    spans = [(row.offset, row.offset + row.bytes) for row in done.manifest.storages]
    pack.pack(done, region, [way.ARENA], keep_private=False)
    data = region.bytes_at(0, done.manifest.bytes).tolist()
    covered = {byte for low, high in spans for byte in range(low, high)}
    assert len(covered) == 4 * (1 + 5 + 129 + 300)
    assert [byte for index, byte in enumerate(data) if index not in covered and byte] == []


def _exported_aligned(model: Any) -> exporting.Export:
    """Export with the real alignment, whatever packing is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "ALIGNMENT", 512)
        return way.exported(model)


@rule(
    "construction-is-not-kept-alive",
    wrapping(walk.Walk, "without_tensors", lambda original, self: self),
)
def check_built_keeps_nothing() -> None:
    model = simple(put("a", lambda: parameter(3)))()
    gone = weakref.ref(model.a)
    built = walk.walk(model).without_tensors()
    del model.a
    gc.collect()
    assert gone() is None
    assert built.tensors


@rule("what-only-rebalancing-reads-stays-out", replacing(walk, "LEFT_OUT", frozenset()))
def check_rebalancing() -> None:
    model = simple(nothing, put("routed_experts_weights_of_layer", lambda: Helper(w=fresh(2))))()
    assert "routed_experts" not in repr(way.exported(model).manifest)


# -- sets that share -------------------------------------------------------------------------------------------------


class Target(nn.Module):
    """A target model whose embedding, head weight and rotary module a draft uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = parameter(3, 4)
        self.rotary = Rotary()

    def load(self) -> None:
        fill(self)


class Draft(nn.Module):
    """A draft model."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)
        self.embedding = target.embedding
        self.head = target.head
        self.rotary = target.rotary

    def load(self) -> None:
        fill(self.own)


def two_sets() -> tuple[way.Attached, way.Attached]:
    """Publish target and draft, attach both."""
    first = way.publish(Target)
    known = first.exported.known("target")
    second = way.publish(lambda: Draft(first.model), known)
    target = way.attach(first, Target)
    draft = way.attach(second, lambda: Draft(Target()), {"target": target.rebuilt})
    return target, draft


@rule("external-modules", replacing(exporting, "_external_module", lambda module, known: ""))
def check_external_modules() -> None:
    target, draft = two_sets()
    assert draft.model.embedding is target.model.embedding
    assert draft.model.rotary is target.model.rotary
    assert draft.comparison.problems == []


def own_rows(original: Any, self: Any, *args: Any) -> None:
    loaded, device, _ = args
    original(self, loaded, device, None)
    self.known = None


@rule("external-tensors", wrapping(exporting._Storages, "__init__", own_rows))
def check_external_tensors() -> None:
    target, draft = two_sets()
    assert draft.model.head is target.model.head
    assert draft.published.manifest.bytes < 2 * 512 + 1


@rule("what-another-set-holds-is-left-out", replacing(exporting, "_leave_out", lambda loaded, modules: None))
def check_left_out() -> None:
    _, draft = two_sets()
    held = {index for index, row in enumerate(draft.published.manifest.modules) if row.external}
    assert len(held) == 2
    assert not any(slot.module in held for slot in draft.published.manifest.slots)


@rule(
    "known-objects-stay-alive",
    wrapping(
        exporting.Export, "known", lambda original, self, role: dataclasses.replace(original(self, role), objects=())
    ),
)
def check_known_alive() -> None:
    model = Target()
    done = way.exported(model)
    known = done.known("target")
    gone = weakref.ref(model.head)
    del model, done
    gc.collect()
    assert gone() is not None, "its id could be given to another tensor"
    assert id(gone()) in known.tensors


@rule("missing-target", replacing(rebuilding._Builder, "_external_module", lambda self, reference: self.model))
def check_missing_target() -> None:
    first = way.publish(Target)
    second = way.publish(lambda: Draft(first.model), first.exported.known("target"))
    with pytest.raises(AttachFailed, match="needs the module 'embedding' of the set 'target', which is not attached"):
        way.attach(second, lambda: Draft(Target()))


class Holder:
    """An object with a method."""

    def __init__(self, held: object) -> None:
        self.held = held

    def apply(self) -> object:
        return self.held


def defaulting(value: object) -> Callable[..., object]:
    def function(held: object = value) -> object:
        return held

    return function
