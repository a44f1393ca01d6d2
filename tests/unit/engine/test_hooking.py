"""Hooks in place and through the registry, and whether they hold against other plugins."""

from __future__ import annotations

import functools
import sys
import types
from enum import Enum
from typing import Any

import pytest

from weightcache.engine import hooking


class HookType(Enum):
    REPLACE = "replace"
    AROUND = "around"


class Registry:
    """In the place of SGLang's: keeps what is registered, and applies nothing."""

    def __init__(self) -> None:
        self._hooks: dict[str, list[Any]] = {}
        self._patched: set[str] = set()

    def register(self, target: str, hook: Any, kind: HookType) -> None:
        self._hooks.setdefault(target, []).append((kind, hook, None))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    name = ""
    for part in ("sglang", "srt", "plugins", "hook_registry"):
        name = f"{name}.{part}".lstrip(".")
        module: Any = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module.HookRegistry, module.HookType = made, HookType
    monkeypatch.setattr(hooking, "_in_place", {})
    return made


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = types.ModuleType("hooked_module")

    class Scheduler:
        def on_idle(self, step: int = 1) -> int:
            """Counts."""
            return step

        @classmethod
        def make(cls) -> str:
            return cls.__name__

    def load(size: int) -> int:
        return size

    made.Scheduler, made.load = Scheduler, load
    monkeypatch.setitem(sys.modules, "hooked_module", made)
    return made


IDLE = "hooked_module.Scheduler.on_idle"
LOAD = "hooked_module.load"


def doubled(original: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * original(*args, **kwargs)


def test_methods_are_replaced_on_their_class(registry: Registry, module: Any) -> None:
    before = module.Scheduler()
    hooking.around(IDLE, doubled)
    assert (before.on_idle(), module.Scheduler().on_idle(step=4)) == (2, 8)
    assert module.Scheduler.on_idle.__doc__ == "Counts."
    assert registry._hooks == {}
    assert hooking.missing([IDLE]) == []


def test_functions_that_others_import_go_through_the_registry(registry: Registry, module: Any) -> None:
    hooking.around(LOAD, doubled)
    assert module.load(3) == 3
    assert registry._hooks == {LOAD: [(HookType.AROUND, doubled, None)]}
    assert hooking.missing([LOAD]) == [LOAD]
    registry._patched.add(LOAD)
    assert hooking.missing([LOAD]) == []


def test_functions_without_copies_that_matter_do_not(registry: Registry, module: Any) -> None:
    hooking.around(LOAD, doubled, copies=False)
    assert module.load(3) == 6
    assert registry._hooks == {}


def test_what_is_more_than_a_function_goes_through_the_registry(registry: Registry, module: Any) -> None:
    hooking.around("hooked_module.Scheduler.make", doubled)
    assert module.Scheduler.make() == "Scheduler"
    assert list(registry._hooks) == ["hooked_module.Scheduler.make"]


@pytest.mark.parametrize("theirs", [IDLE, "hooked_module.Scheduler"])
def test_where_another_plugin_hooks_the_registry_decides(registry: Registry, module: Any, theirs: str) -> None:
    registry.register(theirs, doubled, HookType.AROUND)
    hooking.around(IDLE, doubled)
    assert module.Scheduler().on_idle() == 1
    assert len(registry._hooks[IDLE]) == (2 if theirs == IDLE else 1)


@pytest.mark.parametrize(
    "target", ["no_such_module.load", "hooked_module.NoClass.run", "hooked_module.Scheduler.no_method"]
)
def test_what_is_not_there_is_missing(registry: Registry, module: Any, target: str) -> None:
    hooking.around(target, doubled)
    assert hooking.missing([target]) == [target]


def test_one_that_is_wrapped_again_still_holds(registry: Registry, module: Any) -> None:
    hooking.around(IDLE, doubled)
    ours = module.Scheduler.on_idle

    @functools.wraps(ours)
    def wrapper(*args: Any) -> Any:
        return ours(*args) + 1

    module.Scheduler.on_idle = wrapper
    assert hooking.missing([IDLE]) == []


def test_one_that_is_replaced_does_not(registry: Registry, module: Any) -> None:
    hooking.around(IDLE, doubled)
    ours = module.Scheduler.on_idle

    @functools.wraps(ours)
    def replacement(*args: Any) -> Any:
        return 0

    registry.register(IDLE, replacement, HookType.REPLACE)
    module.Scheduler.on_idle = replacement
    registry._patched.add(IDLE)
    assert hooking.missing([IDLE]) == [IDLE]


def test_one_whose_class_is_replaced_does_not(registry: Registry, module: Any) -> None:
    hooking.around(IDLE, doubled)
    module.Scheduler = type("Scheduler", (), {"on_idle": lambda self: 0})
    assert hooking.missing([IDLE]) == [IDLE]
