"""Run SGLang's own launch up to the point where the weights are published: ``python -m ... SGLANG_ARGUMENTS``.

The engine is the loader: every option, quantization and parallel layout goes through SGLang's set-up, of which nothing
is repeated here. The HTTP server, tokenizer and detokenizer are left out, and the plugin's hook on
Scheduler.init_memory_pools ends each rank before it allocates KV memory.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from weightcache.engine import directive as directives
from weightcache.errors import LoadFailed, WeightcacheError
from weightcache.loader import load


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every rank has published."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from sglang.srt.entrypoints import engine
        from sglang.srt.managers.scheduler import run_scheduler_process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        raise LoadFailed(f"the loader's interpreter {sys.executable} cannot import SGLang: {error}") from None
    load_plugins()
    server_args = _parsed(prepare_server_args, list(arguments))
    recorder = _Recorder(engine.mp) if _one_rank(server_args) else None
    if recorder is not None:
        engine.mp = recorder
    try:
        engine.Engine._launch_subprocesses(
            server_args=server_args,
            init_tokenizer_manager_func=recorder.run_scheduler if recorder else _no_tokenizer,
            run_scheduler_process_func=run_scheduler_process,
            run_detokenizer_process_func=_no_detokenizer,
        )
    except SystemExit as ended:
        return int(ended.code or 0)
    except RuntimeError as error:
        # With spawned ranks SGLang reports a rank that ended as an error; the agents decide what was published.
        if recorder is None and "exit code: 0" in str(error).replace("exitcode", "exit code"):
            return 0
        raise
    return 1


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


def _one_rank(server_args: Any) -> bool:
    from weightcache.engine.adapter import resolved

    sizes = ("tp_size", "pp_size", "dp_size", "nnodes")
    return all(int(resolved(server_args, name) or 1) == 1 for name in sizes)


class _Recorder:
    """Stands in for ``multiprocessing`` in SGLang's launch: with one rank, this process can be that rank.

    It saves the second import of SGLang (about ten seconds). Processes are recorded instead of started, and the
    scheduler's is called where the tokenizer would be made.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def Process(  # noqa: N802  the name is multiprocessing's
        self, target: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, **_: Any
    ) -> _Recorded:
        self._calls.append((target, tuple(args), dict(kwargs or {})))
        return _Recorded()

    def run_scheduler(self, *_: Any) -> Any:
        if not self._calls:
            raise LoadFailed("SGLang launched no scheduler for these arguments")
        target, args, kwargs = self._calls[0]
        target(*args, **kwargs)
        raise SystemExit(1)


class _Recorded:
    """A process that was not started."""

    pid = 0
    exitcode = None

    def start(self) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """It never lived."""
        return False


def _no_tokenizer(*_: Any) -> Any:
    return None, None


def _no_detokenizer(*_: Any) -> None:
    return


def run() -> int:
    """``main``, with the reason of a failure told to the agents: one sentence, the traceback only in the log."""
    try:
        return main()
    except WeightcacheError as error:
        failure = error
    except Exception as error:  # noqa: BLE001  whatever SGLang raises, the agent gets a sentence
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        failure = LoadFailed(f"SGLang could not start the load: {type(error).__name__}: {first[:500]}")
    # The loaders of single ranks have told their agents; this is about what comes before there is any.
    if (directive := directives.read()) is not None:
        load.tell(directive, failure)
    print(f"weightcache-loader: {failure}", file=sys.stderr)
    return failure.exit_status


if __name__ == "__main__":
    sys.exit(run())
