"""The entry point that SGLang loads (group ``sglang.srt.plugins``): registers hooks, under weightcache's own switch.

Without a directive in the environment nothing is registered. Hooks are registered only in processes that already
imported what they hook: applying a hook imports its target, and a detokenizer should not import the scheduler. SGLang
logs a hook that fails and goes on; therefore the first hooked call checks that all of them took, and the launcher
waits for the report that it sends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightcache.engine import adapter_warm, directive as directives
from weightcache.engine.directive import Directive
from weightcache.errors import WeightcacheError

logger = logging.getLogger(__name__)


def setup() -> None:
    """Called by SGLang in each of its processes."""
    directive = directives.read()
    if directive is None:
        return
    from weightcache.engine import adapter, hooking, slot, tracing

    tracing.setup(directive)
    if adapter.SCHEDULER_MODULE in sys.modules and not _warm_main():
        _register_scheduler(directive)
    elif multiprocessing.parent_process() is None:
        slot.join(directive)
        hooking.around(adapter.LOAD_PLUGINS, _when_everything_is_imported(directive))
        directives.send_report(directive, directives.PluginReady(os.getpid(), "main", adapter.version()))


def _warm_main() -> bool:
    """Whether this is the server's main process, of a parked tree: that has imported everything from the start."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return multiprocessing.parent_process() is None and getattr(spec, "name", "") == adapter_warm.SERVER_MODULE


def _when_everything_is_imported(directive: Directive) -> Callable[..., Any]:
    """SGLang calls load_plugins again just before it launches; by then the HTTP side is imported and can be hooked."""

    def around(original: Callable[[], None]) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from weightcache.engine import adapter, adapter_server, adapter_slot, hooking, refusals, slot, tracing

        original()
        tracing.imported()
        if adapter.TOKENIZER_CONTROL.rpartition(".")[0] in sys.modules:
            for verb in ("release_memory_occupation", "resume_memory_occupation"):
                hooking.around(f"{adapter.TOKENIZER_CONTROL}.{verb}", refusals.released(verb))
        _register_server(directive)
        HookRegistry.apply_hooks()
        slot.prove((adapter_server.SERVER_STARTUP, adapter_server.WAIT_AND_WARMUP, adapter_slot.SEND))

    return around


def _register_server(directive: Directive) -> None:
    from weightcache.engine import adapter_server, adapter_slot, hooking, listener, slot, warmup

    ready = None
    if (in_slot := slot.server()) is not None:
        ready = in_slot.listening
        hooking.around(adapter_server.SERVER_STARTUP, in_slot.around_startup)
    elif directive.listener:
        ready = listener.listening
        hooking.around(adapter_server.SERVER_STARTUP, listener.hook(directive))
    if warmup.LEVER in directive.levers and directive.warmed and adapter_server.HTTP_SERVER in sys.modules:
        hooking.around(adapter_server.WAIT_AND_WARMUP, warmup.hook(Path(directive.warmed), ready), copies=False)
    if in_slot is not None:
        hooking.around(adapter_server.WAIT_AND_WARMUP, in_slot.around_warm_up, copies=False)
        hooking.around(adapter_slot.SEND, in_slot.around_send, copies=False)


def _register_scheduler(directive: Directive) -> None:
    from weightcache import transport
    from weightcache.engine import adapter, hooking, refusals, slot

    transport.make_room()
    hooks: dict[str, Callable[..., Any]] = {
        adapter.LOAD_MODEL: _load_model(directive),
        adapter.GET_MODEL_LOADER: _get_model_loader(directive),
        adapter.INIT_MEMORY_POOLS: _init_memory_pools(directive),
        adapter.RUN_EVENT_LOOP: _run_event_loop,
        adapter.ENABLE_OWN_CACHE: _leave_load_format_alone,
        **slot.rank_hooks(directive),
    }
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    for verb in refusals.OUTPUTS:
        if hasattr(SchedulerWeightUpdaterManager, verb):  # 0.5.17 has no begin and end
            hooks[f"{adapter.WEIGHT_UPDATER}.{verb}"] = refusals.hook(verb)
    for target, hook in hooks.items():
        hooking.around(target, hook)
    _expected.update(hooks)
    _register_late_graphs(directive)


def _register_late_graphs(directive: Directive) -> None:
    """A lever, which no engine depends on: not among the hooks that have to take."""
    from weightcache.engine import hooking, late_graphs

    if directive.purpose == "engine" and late_graphs.LEVER in directive.levers:
        marker = Path(f"{directive.warmed}.capturing") if directive.warmed else None
        late = late_graphs.Late(lambda targets: not hooking.missing(targets), marker)
        for target, hook in late.hooks().items():
            hooking.around(target, hook, copies=False)


_expected: set[str] = set()
_runners: list[Any] = []
"""The ModelRunner whose load_model runs now: only its loaders are ours (weight updates make loaders of their own)."""


def _load_model(directive: Directive) -> Callable[..., Any]:
    def around(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        _prove_hooks(directive)
        _runners.append(runner)
        try:
            result = original(runner, *args, **kwargs)
        finally:
            _runners.pop()
        if directive.inventory:
            from weightcache.engine import inventory

            inventory.write(Path(directive.inventory), runner)
        return result

    return around


def _prove_hooks(directive: Directive) -> None:
    from weightcache.engine import adapter, hooking

    if missing := hooking.missing(_expected):
        raise WeightcacheError(f"SGLang {adapter.version()} does not let weightcache hook {', '.join(missing)}")
    directives.send_report(directive, directives.PluginReady(os.getpid(), "scheduler", adapter.version()))


def _get_model_loader(directive: Directive) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        if not _runners:
            return inner
        if directive.purpose == "loader":
            from weightcache.engine.export_role import PublishingLoader

            return PublishingLoader(inner, _runners[-1], directive)
        from weightcache.engine.serve import ServingLoader

        return ServingLoader(inner, _runners[-1], directive)

    return around


def _init_memory_pools(directive: Directive) -> Callable[..., Any]:
    """Called once, after target and draft are loaded on all ranks and before any KV memory is allocated."""

    def around(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        from weightcache.engine import adapter, export_role, slot, state

        slot.before_pools(scheduler)
        if directive.purpose == "loader":
            export_role.finish()
        if resident := sum(state.process.resident_bytes.values()):
            adapter.add_to_baseline(scheduler.tp_worker.model_runner, resident)
        return original(scheduler, *args, **kwargs)

    return around


def _run_event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang ends its processes with SIGKILL after any failure: only here can be seen that the device was at fault."""
    from weightcache.engine import faults, slot

    slot.rank_ready()
    try:
        return original(scheduler, *args, **kwargs)
    except Exception as error:
        faults.report(error)
        raise


def _leave_load_format_alone(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """SGLang's own --weight-cache-mode would change the load format of the whole runner; the launcher consumed it."""
