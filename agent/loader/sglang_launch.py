"""Run SGLang's own launch up to the point where the weights are published: ``python -m ... SGLANG_ARGUMENTS``.

The engine is the loader: every option, quantization and parallel layout goes through SGLang's set-up, of which nothing
is repeated here. The HTTP server, tokenizer and detokenizer are left out, and the plugin's hook on
Scheduler.init_memory_pools ends each rank before it allocates KV memory. The override of _launch_scheduler_processes
(SGLang's own seam for other kinds of processes) therefore waits for the ranks, and never returns.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from weightcache.engine import directive as directives
from weightcache.errors import LoadFailed, WeightcacheError
from weightcache.loader import ranks, reasons


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every rank has published."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from sglang.srt.entrypoints import engine
        from sglang.srt.managers import data_parallel_controller
        from sglang.srt.managers.scheduler import run_scheduler_process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        raise LoadFailed(f"the loader's interpreter {sys.executable} cannot import SGLang: {error}") from None
    from weightcache.engine import adapter

    load_plugins()
    server_args = _parsed(prepare_server_args, list(arguments))
    local = _local_ranks()
    processes = ranks.Processes(
        engine.mp,
        engine.run_data_parallel_controller_process,
        local,
        alone=len(local) == 1 and int(adapter.resolved(server_args, "dp_size") or 1) == 1,
    )
    engine.mp = data_parallel_controller.mp = processes
    # To the controller each rank's end is an exception, even a good one.
    data_parallel_controller.logger.addFilter(lambda record: "EOFError" not in record.getMessage())

    class Launch(engine.Engine):  # type: ignore[misc]
        @classmethod
        def _launch_scheduler_processes(cls, *arguments: Any, **keywords: Any) -> Any:
            # SGLang's handler would end this process for the first rank that ends, even well. No SIG_IGN: the ranks
            # would inherit it.
            signal.signal(signal.SIGQUIT, lambda *_: None)
            super()._launch_scheduler_processes(*arguments, **keywords)
            processes.join()
            raise SystemExit(0)

    try:
        Launch._launch_subprocesses(
            server_args=server_args,
            init_tokenizer_manager_func=_not_reached,
            run_scheduler_process_func=functools.partial(ranks.run, run_scheduler_process),
            run_detokenizer_process_func=_not_reached,
        )
    except SystemExit as ended:
        return int(ended.code or 0)
    return LoadFailed.exit_status


def _local_ranks() -> list[int]:
    directive = directives.read()
    return [int(name.removeprefix("rank:")) for name in directive.sockets] if directive else [0]


def _parsed(parse: Callable[[list[str]], Any], arguments: list[str]) -> Any:
    """SGLang's own parser prints pages of usage and exits; the sentence that matters is its last line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(arguments)
    except SystemExit:
        reason = (said.getvalue().strip().splitlines() or ["no reason given"])[-1].partition("error: ")
        raise LoadFailed(f"SGLang refuses the [model] arguments: {reason[2] or reason[0]}") from None
    finally:
        sys.stderr.write(said.getvalue()[-4000:])


def _not_reached(*_: Any) -> Any:
    raise LoadFailed("SGLang went on without its schedulers")


def run() -> int:
    """``main``, with the reason of a failure left for the parent, which says it: a traceback is for the log only."""
    try:
        return main()
    except WeightcacheError as error:
        failure = error
    except Exception as error:  # noqa: BLE001  whatever SGLang raises, the agent gets a sentence
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        failure = LoadFailed(f"SGLang could not start the load: {type(error).__name__}: {first[:500]}")
    reasons.leave(reasons.of(failure))
    return failure.exit_status


if __name__ == "__mp_main__":  # imported again in each rank's process, before anything else there
    ranks.end_with_parent()

if __name__ == "__main__":
    status = run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing else is left to do, and an orderly end would wait for SGLang's threads and sockets.
    os._exit(status)
