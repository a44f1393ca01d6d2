"""What the plugin registers for an engine in a slot (docs/standby.md). Its processes are directed by the launcher.

SGLang goes on without a plugin that fails. An engine in a slot must not: it would take the public port by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcache.engine.directive import Directive
from weightcache.errors import WeightcacheError
from weightcache.standby.messages import Slot

if TYPE_CHECKING:
    from weightcache.engine.slot_rank import SlotRank
    from weightcache.engine.slot_server import SlotServer

_server: list[SlotServer] = []
"""At most one, in the main process."""
_rank: list[SlotRank] = []
"""At most one, in a process that may become a scheduler."""


def join(directive: Directive) -> None:
    """In the main process: take the launcher's orders from now on, or end with the reason."""
    if (slot := _slot_of(directive)) is None:
        return
    from weightcache.engine import slot_server

    try:
        _server.append(slot_server.SlotServer(slot))
    except (WeightcacheError, OSError) as error:
        raise SystemExit(f"weightcache: {error}") from None


def server() -> SlotServer | None:
    """The main process's part."""
    return _server[0] if _server else None


def prove(needed: Iterable[str]) -> None:
    """In the main process: end it if it serves without being directed."""
    from weightcache.engine import adapter, hooking

    if _server and (missing := hooking.missing(needed)):
        raise SystemExit(
            f"weightcache: SGLang {adapter.version()} does not let an engine in a slot hook {', '.join(missing)}"
        )


def rank_hooks(directive: Directive) -> dict[str, Callable[..., Any]]:
    """Hooks of a scheduler, all of which have to take."""
    if (slot := _slot_of(directive)) is None:
        return {}
    from weightcache.engine import adapter_slot, slot_rank

    hooks: dict[str, Callable[..., Any]] = {}
    memory: slot_rank.Memory = slot_rank.HostMemory()
    if directive.backend == "cuda":
        from weightcache.engine import kv_plan, parked_kv

        adapter_slot.beside_another_engine()
        memory = parked = parked_kv.ParkedMemory(slot.unproven)
        plan = kv_plan.Plan(Path(slot.plan), Path(slot.lock), slot.reserve_bytes, slot.kv_bytes, slot.engine)
        hooks = parked_kv.hooks(plan, parked.budgeted)
    rank = slot_rank.SlotRank(directive, slot, memory)
    _rank.append(rank)
    return {**hooks, adapter_slot.RANK_KNOWN: rank.around_rank_known, adapter_slot.INPUT: rank.around_input}


def before_pools(scheduler: Any) -> None:
    """In a scheduler: the model is loaded, and KV memory is about to be made."""
    for rank in _rank:
        rank.before_pools(scheduler)


def rank_ready() -> None:
    """In a scheduler: its event loop begins."""
    for rank in _rank:
        rank.ready()


def _slot_of(directive: Directive) -> Slot | None:
    return directive.slot if directive.purpose == "engine" else None
