"""Our functions around SGLang's.

SGLang's HookRegistry looks through all modules for copies of every function that it replaces, which takes 40 ms a
function. A method has no copies, and some functions none that matter: those are replaced where they are. The others,
and those that another plugin has hooked by then, go through the registry. A replacement that another plugin registers
later takes ours away, which ``missing`` tells.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

Hook = Callable[..., Any]

_in_place: dict[str, Callable[..., Any]] = {}
"""What stands in the place of each function that was replaced here."""


def around(target: str, hook: Hook, copies: bool = True) -> None:
    """Call ``hook`` with the original and its arguments in place of ``target``, a dotted name.

    ``copies``: whether other modules may hold the function under names of their own (``from module import name``).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        owner = None  # the registry says so in the log
    others = target in HookRegistry._hooks or path in HookRegistry._hooks
    if owner is None or others or (copies and not isinstance(owner, type)) or not callable(vars(owner).get(name)):
        HookRegistry.register(target, hook, HookType.AROUND)
        return
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    _in_place[target] = wrapper


def missing(targets: Iterable[str]) -> list[str]:
    """Those of ``targets`` that are not hooked, although they were to be."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    # The registry also applies what other plugins registered for a target that was replaced here.
    return sorted(t for t in targets if not (_stands(t) if t in _in_place else t in HookRegistry._patched))


def _stands(target: str) -> bool:
    """Whether our function is still there: other plugins may wrap it, or replace it, even with its whole class."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrapper = _in_place.get(target)
    if any(kind == HookType.REPLACE for kind, *_ in HookRegistry._hooks.get(target, ())):
        return False  # what replaces a function is marked as if it called it
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while wrapper is not None and found is not wrapper and found is not None:
        found = getattr(found, "__wrapped__", None)
    return wrapper is not None and found is wrapper
