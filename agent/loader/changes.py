"""What loading changed in a module tree, apart from the bytes: names, containers and plain values.

An engine constructs the same model class, so whatever loading left alone is there already. What it changed is carried
as rows of the manifest. What no row can express is refused here, with its path, rather than lost.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightcache import manifest
from weightcache.errors import ExportRefused
from weightcache.loader.walk import Place, Walk, class_name
from weightcache.manifest import Scalar

MAKEABLE = frozenset(
    {
        "builtins.list", "builtins.tuple", "builtins.dict", "builtins.set", "builtins.frozenset", "torch.Size",
        "collections.OrderedDict", "collections.deque",
    }
)  # fmt: skip
"""Containers that an engine can make by itself; of any other class it must have constructed one."""

_RESIZABLE = frozenset({"collections.defaultdict"})
_ABSENT = object()


class Changes:
    """The difference between ``built``, the walk after construction, and ``loaded``, the walk after loading."""

    def __init__(self, built: Walk, loaded: Walk) -> None:
        self.built = built
        self.loaded = loaded
        before = {id(entry.module): index for index, entry in enumerate(built.modules)}
        self._origin = {index: before.get(id(entry.module), -1) for index, entry in enumerate(loaded.modules)}
        self._tensors_before = {(entry.module, entry.steps) for entry in built.tensors}
        self._tensors_now = {(entry.module, entry.steps) for entry in loaded.tensors}
        self._moved: dict[Place, Place] = {}
        self._made: dict[Place, None] = {}  # in the order of the walk
        self._find_moved()

    def check(self) -> None:
        """Raise ExportRefused for changes that no row can carry."""
        self._check_modules()
        self._check_objects()
        self._check_aliases()

    def _find_moved(self) -> None:
        """An object that several places held is walked from another one when loading emptied the first."""
        now = {*self.loaded.containers, *self.loaded.objects, *self.loaded.aliases}
        origins = {(self._origin[module], steps) for module, steps in now}
        for place in sorted((*self.loaded.containers, *self.loaded.objects), key=lambda place: len(place[1])):
            first = self.built.aliases.get(self._before(place))
            if isinstance(first, tuple) and first not in origins and first not in self._moved.values():
                self._moved[place] = first

    def _before(self, place: Place) -> Place:
        """The place after construction of what is at ``place`` now."""
        module, steps = place
        for depth in range(1, len(steps) + 1) if self._moved else ():
            if (first := self._moved.get((module, steps[:depth]))) is not None:
                return first[0], first[1] + steps[depth:]
        return self._origin[module], steps

    def _existed(self, place: Place) -> bool:
        """Whether construction leaves anything at ``place``."""
        built = self.built
        return (
            place in self._tensors_before
            or place in built.scalars
            or place in built.containers
            or place in built.objects
            or place in built.aliases
        )

    def _refuse(self, verb: str, place: Place, what: str) -> ExportRefused:
        return ExportRefused(f"loading {verb} {self.loaded.path(*place)} {what}, which cannot be carried")

    def _check_modules(self) -> None:
        now = {id(entry.module): set(entry.paths) for entry in self.loaded.modules}
        for entry in self.built.modules:
            for path in entry.paths:
                if path not in now.get(id(entry.module), ()):
                    raise ExportRefused(f"loading removed the module {path}")
        for index, origin in self._origin.items():
            if origin < 0 and (index, manifest.PARAMETER) in self.loaded.names:  # modules of another set have no names
                raise ExportRefused(f"loading added the module {self.loaded.modules[index].paths[0]}")

    def _check_objects(self) -> None:
        for place, (kind, names) in self.loaded.objects.items():
            before = self.built.objects.get(self._before(place))
            if before is None or before[0] != kind:
                if not manifest.is_record(kind):
                    raise self._refuse("set", place, f"to a {kind}")
                self._check_holder(place)
                self._made[place] = None
                continue
            for name in before[1]:
                if name not in names:
                    raise ExportRefused(f"loading removed {self.loaded.path(*place)}.{name}, which cannot be carried")

    def _check_aliases(self) -> None:
        for place, target in self.loaded.aliases.items():
            before = self.built.aliases.get(self._before(place))
            same = before == target if isinstance(target, str) else before == self._before(target)
            if not same and target not in self._made:
                where = target if isinstance(target, str) else self.loaded.path(*target)
                raise self._refuse("set", place, f"to the object at {where or 'the root'}")
        for place in self.loaded.containers:
            if self._before(place) in self.built.aliases:
                raise self._refuse("gave", place, "an object of its own")

    def records(self) -> Iterator[manifest.Record]:
        """Helper objects that loading made, and the other places that hold one of them."""
        for place in self._made:
            yield manifest.Record(*place, self.loaded.objects[place][0])
        for place, target in self.loaded.aliases.items():
            if not isinstance(target, str) and target in self._made:
                yield manifest.Record(*place, "", *target)

    def removed(self) -> Iterator[manifest.Removed]:
        """Names that construction leaves on a module and loading took away, and registered tensors set to None."""
        for (module, place), names in self.loaded.names.items():
            before = self.built.names.get((self._origin[module], place), ())
            held = self._registered(module, place)
            for name in before:
                if name not in names:
                    yield manifest.Removed(module, place, name, none=False)
                elif held.get(name, _ABSENT) is None and self._was_tensor(module, name):
                    yield manifest.Removed(module, place, name, none=True)

    def _registered(self, module: int, place: str) -> Mapping[str, Any]:
        owner = self.loaded.modules[module].module
        tables: dict[str, Mapping[str, Any]] = {manifest.PARAMETER: owner._parameters, manifest.BUFFER: owner._buffers}
        return tables.get(place, {})

    def _was_tensor(self, module: int, name: str) -> bool:
        return (self._origin[module], (("attr", name),)) in self._tensors_before

    def names(self) -> Iterator[manifest.Names]:
        """The names of a table of parameters or buffers where the other rows would give another order."""
        for (module, place), names in self.loaded.names.items():
            if place == manifest.ATTRIBUTE:
                continue
            kept = [name for name in self.built.names.get((self._origin[module], place), ()) if name in names]
            held = self._registered(module, place)
            added = [name for name in names if name not in kept and held[name] is not None]
            if (*kept, *added) != names:
                yield manifest.Names(module, place, names)

    def containers(self) -> Iterator[manifest.Container]:
        """Containers that loading made or resized."""
        for place, (kind, keys) in self.loaded.containers.items():
            before = self.built.containers.get(self._before(place))
            if before == (kind, keys):
                continue
            known = kind in MAKEABLE or (kind in _RESIZABLE and before is not None and before[0] == kind)
            if not known or not all(type(key) is str or type(key) is int for key in keys):
                raise self._refuse("set", place, f"to a {kind}")
            self._check_holder(place)
            yield manifest.Container(place[0], place[1], kind, keys)

    def _check_holder(self, place: Place) -> None:
        """What is placed on a tensor needs the tensor that construction makes: its attributes are taken from there."""
        for depth in range(1, len(place[1])):
            holder = (place[0], place[1][:depth])
            if holder in self._tensors_now and self._before(holder) not in self._tensors_before:
                raise self._refuse("set", place, "to an object of its own")

    def scalars(self) -> Iterator[manifest.ChangedScalar]:
        """Plain values that loading set or changed."""
        for place, value in self.loaded.scalars.items():
            module, steps = place
            before = self._before(place)
            old = self.built.scalars.get(before, _ABSENT)
            if len(steps) == 1:
                name = steps[0][1]
                if any(name in self.loaded.names[module, table] for table in (manifest.PARAMETER, manifest.BUFFER)):
                    continue  # a registered None: see removed() and names()
                if name not in self.built.names.get((before[0], manifest.ATTRIBUTE), ()):
                    old = _ABSENT
            if type(old) is type(value) and (old == value or (old != old and value != value)):
                continue
            yield manifest.ChangedScalar(module, steps, self._scalar(place, value, old))

    def _scalar(self, place: Place, value: Any, old: Any) -> Scalar:
        if isinstance(value, torch.dtype):
            return ("dtype", dtype_name(value))
        if isinstance(value, enum.Enum):
            cls = type(value)
            # The engine takes the class from the value that construction left: nothing is found by name.
            if type(old) is not cls or cls.__members__.get(value.name) is not value:
                raise self._refuse("set", place, f"to a {class_name(cls)}")
            return ("enum", f"{class_name(cls)}:{value.name}")
        if type(value) in (bool, int, float, str, type(None)):
            plain: Scalar = value
            return plain
        raise self._refuse("set", place, f"to a {class_name(type(value))}")

    def carried_attributes(self) -> dict[int, tuple[str, ...]]:
        """Tensor → the attributes that an attached tensor takes over from the one it replaces."""
        result: dict[int, tuple[str, ...]] = {}
        for entry in self.loaded.tensors:
            if id(entry.tensor) in result or not hasattr(entry.tensor, "__dict__"):
                continue
            names = []
            for name in vars(entry.tensor):
                place: Place = (entry.module, (*entry.steps, ("attr", name)))
                # Values that loading added come as rows of their own.
                if self._existed(self._before(place)) or place in self.loaded.containers:
                    names.append(name)
            result[id(entry.tensor)] = tuple(names)
        return result


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
