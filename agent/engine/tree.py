"""A model that was just built on ``meta``, looked through once: its modules, their tables, and what is on ``meta``.

None of this needs the set, so an engine does it while it has nothing to bind yet. Thousands of modules fit no cache:
what was read here is not looked for again one by one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightcache import manifest
from weightcache.loader.walk import class_name

Table = dict[str, Any]
"""The parameters, the buffers or the ``__dict__`` of a module."""

name_of: Callable[[type], str] = functools.cache(class_name)
"""Made once for each class: a model has thousands of modules of few classes."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Lists of one entry a module, in the order and with the paths of loader.walk.find_modules.

    ``by_path`` has every path. ``on_meta`` are the places of parameters, buffers and attributes that hold a tensor
    without memory, in this order: all of them have to be given another value.
    """

    modules: list[nn.Module]
    paths: list[tuple[str, ...]]
    classes: list[str]
    by_path: dict[str, nn.Module]
    own: list[Table]
    parameters: list[Table]
    buffers: list[Table]
    on_meta: list[tuple[Table, str]]

    def is_of(self, rows: tuple[manifest.Module, ...]) -> bool:
        """Whether these are exactly the modules of ``rows``: every path and class, and none that is another set's."""
        return (
            self.paths == [row.paths for row in rows]
            and self.classes == [row.cls for row in rows]
            and not any(row.external for row in rows)
        )


def look_through(model: nn.Module) -> Tree:
    """The tree of ``model`` as it is now."""
    modules: list[nn.Module] = []
    paths: list[tuple[str, ...]] = []
    by_path: dict[str, nn.Module] = {}
    own: list[Table] = []
    rows: dict[int, int] = {}
    pending = [(model, "")]
    while pending:
        module, path = pending.pop()
        by_path[path] = module
        row = rows.setdefault(id(module), len(modules))
        if row < len(modules):
            paths[row] += (path,)
            continue
        modules.append(module)
        paths.append((path,))
        held = vars(module)
        own.append(held)
        if children := held["_modules"]:
            prefix = f"{path}." if path else ""
            pending += [(child, prefix + name) for name, child in reversed(children.items()) if child is not None]
    parameters: list[Table] = [held["_parameters"] for held in own]
    buffers: list[Table] = [held["_buffers"] for held in own]
    return Tree(
        modules=modules,
        paths=paths,
        classes=[name_of(type(module)) for module in modules],
        by_path=by_path,
        own=own,
        parameters=parameters,
        buffers=buffers,
        on_meta=on_meta([*parameters, *buffers, *with_tensors(own)]),
    )


def with_tensors(tables: list[Table]) -> list[Table]:
    """``tables`` where any of them holds a tensor, else none.

    Of thousands of attributes hardly one is a tensor: their few types are looked at first, in one go.
    """
    held = itertools.chain.from_iterable(map(dict.values, tables))
    return tables if any(map(_is_tensor_class, set(map(type, held)))) else []


def on_meta(tables: Iterable[Table]) -> list[tuple[Table, str]]:
    """The places in ``tables`` that hold a tensor without memory."""
    return [
        (table, name)
        for table in filter(None, tables)
        for name, value in table.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]


@functools.cache
def _is_tensor_class(cls: type) -> bool:
    return issubclass(cls, torch.Tensor)
