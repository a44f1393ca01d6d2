"""Every process of an engine says when it began, what its start spent its time on, and when it can do its work.

A mark is one line in the trace that the launcher made (``Directive.trace``). Nothing here may disturb an engine: what
fails is left out, silently. SGLang's functions are wrapped where they are, without HookRegistry: that looks through
all of SGLang's modules for copies of each function that it replaces, which takes 30 to 40 ms a function, and none of
these has any that matters.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from weightcache.engine import adapter_phases as sglang, directive as directives
from weightcache.engine.directive import Directive, Milestone
from weightcache.starts.reading import FIRST_TOKEN, SERVING, WARM_UP_TOKEN
from weightcache.starts.record import Writer, process_began

Before = Callable[..., Any]
After = Callable[..., Any]


class _Trace:
    """This process's trace, and how far it is."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.directive: Directive | None = None
        self.handed_over: float | None = None
        self.warming_up = False
        self.seen: set[str] = set()
        self.wrapped: set[str] = set()


_trace = _Trace()


def begin(how: str = "warm") -> None:
    """A parked process, which was started long before, now belongs to a start: call it at the hand-over.

    What it did before is not part of that start. The trace itself is opened when SGLang loads its plugins, as in any
    other process, and says ``how`` this one came. May be called before or after the environment was handed over.
    """
    if how == "warm":
        _trace.handed_over = time.monotonic()


def setup(directive: Directive) -> None:
    """Called in every process of the engine that SGLang loads its plugins in. Never raises."""
    with suppress(Exception):
        _setup(directive)


def imported() -> None:
    """The main process has imported whatever it serves with, and starts its children next. Never raises."""
    if not _active():
        return
    with suppress(Exception):
        _trace.writer.mark("end", "imports")
        _wrap_phases(sglang.MAIN)
        _wrap(sglang.SERVER_RUNS, before=lambda *_, **__: _trace.writer.mark("begin", "http server"))
        _wrap(sglang.LISTENS, after=_listening)
        _wrap(sglang.SERVES, before=_warming_up, after=_serving)
        _wrap(sglang.OUTPUT, before=_output)
        _trace_children()


@contextmanager
def phase(name: str, facts: Mapping[str, float] | None = None) -> Iterator[None]:
    """What happens inside the block is the phase ``name`` of this process; it is not ended by an exception."""
    _trace.writer.mark("begin", name, facts=facts)
    yield
    _trace.writer.mark("end", name)


def _active() -> bool:
    return _trace.directive is not None


def _setup(directive: Directive) -> None:
    if _active() or directive.purpose != "engine" or directive.explain or not (directive.trace or directive.report):
        return
    _trace.directive = directive
    _trace.writer = Writer.to(directive.trace)
    role = _role()
    began = time.monotonic()
    with suppress(OSError, ValueError, IndexError):
        began = process_began()
    if _trace.handed_over is None:
        _trace.writer.mark("process", role, how="cold", facts={"began": began})
    else:
        waited = {"began": _trace.handed_over, "waited_since": began}
        _trace.writer.mark("process", role, how="warm", facts=waited)
    if role == "main":
        _wrap_phases(sglang.ARGUMENTS)
        _wrap(next(iter(sglang.ARGUMENTS)), after=lambda *_, **__: _trace.writer.mark("begin", "imports"))
    else:
        _wrap(sglang.SCHEDULER_BEGINS, before=lambda *_, **__: _wrap_phases(sglang.SCHEDULER))
        for phases in (sglang.SCHEDULER, sglang.CONTROLLER, sglang.DETOKENIZER):
            _wrap_phases(phases)
        _wrap(sglang.RANK_KNOWN, before=_rank)
        _wrap(sglang.GRAPHS_BEGIN, before=lambda *_, **__: _wrap_phases(sglang.GRAPHS, sized=True))
        for target, name in sglang.READY.items():
            _wrap(target, before=_point(name))


def _role() -> str:
    if multiprocessing.parent_process() is None:
        return "main"
    function = getattr(multiprocessing.current_process(), "_target", None)
    return sglang.ROLES.get(getattr(function, "__name__", ""), "child")


def _point(name: str) -> Before:
    def before(*_: Any, **__: Any) -> None:
        if name not in _trace.seen:
            _trace.seen.add(name)
            _trace.writer.mark("point", name)

    return before


def _rank(scheduler: Any, *_: Any, **__: Any) -> None:
    rank, replica = sglang.rank_of(scheduler)
    _trace.writer.mark("point", "rank", rank=rank, facts={"replica": replica} if replica else None)


def _listening(result: Any, *_: Any, **__: Any) -> Any:
    async def until_done() -> Any:
        done = await result
        if "listening" not in _trace.seen:  # once: what listens besides is not the server
            _trace.writer.mark("end", "http server")
            _point("listening")()
        return done

    return until_done()


def _warming_up(*_: Any, **__: Any) -> None:
    _trace.warming_up = True
    _trace.writer.mark("begin", "warm-up")


def _serving(*_: Any, **__: Any) -> None:
    _trace.warming_up = False
    _trace.writer.mark("end", "warm-up")
    _milestone(SERVING)


def _output(manager: Any, output: Any, *_: Any, **__: Any) -> None:
    """The first token of a request is that of the first output. While the server warms up, it is the engine's first."""
    if FIRST_TOKEN in _trace.seen:
        return
    if _trace.warming_up:
        _milestone(WARM_UP_TOKEN)
    elif not all(map(sglang.is_health_check, output.rids)):
        _milestone(FIRST_TOKEN)


def _milestone(name: Any) -> None:
    if name in _trace.seen or _trace.directive is None:
        return
    _trace.seen.add(name)
    now = time.monotonic()
    _trace.writer.mark("point", name, at=now)
    # In a thread, since a launcher that does not listen must not hold up a server's event loop.
    report = functools.partial(directives.send_report, _trace.directive, Milestone(os.getpid(), name, now))
    threading.Thread(target=report, name="weightcache-milestone", daemon=True).start()


def _trace_children() -> None:
    """Have those children traced that do not load plugins by themselves."""
    _wrap(sglang.SPAWN_DETOKENIZER, before=_traced_detokenizer)
    engine = sys.modules.get(sglang.SPAWNS_CONTROLLER)
    function = getattr(engine, sglang.CONTROLLER_FUNCTION, None)
    if function is not None and not sglang.loads_plugins(sys.modules.get(function.__module__)):
        setattr(engine, sglang.CONTROLLER_FUNCTION, Traced(function))


def _traced_detokenizer(*args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
    function = kwargs.get(sglang.DETOKENIZER_FUNCTION)
    if function is None or sglang.loads_plugins(sys.modules.get(function.__module__)):
        return None
    return args, {**kwargs, sglang.DETOKENIZER_FUNCTION: Traced(function)}


class Traced:
    """A child's function that looks like itself, and can be pickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trace this process, then run the function."""
        with suppress(Exception):
            if (directive := directives.read()) is not None:
                setup(directive)
        return self.function(*args, **kwargs)


def _wrap_phases(phases: Mapping[str, str], sized: bool = False) -> None:
    """Mark the calls of those functions whose modules are imported by now; more may be at the next time."""
    for target, name in phases.items():
        if target in _trace.wrapped:
            continue

        def before(*args: Any, _name: str = name, **kwargs: Any) -> None:
            size = args[1] if sized and len(args) > 1 else kwargs.get("size", kwargs.get("bs")) if sized else None
            _trace.writer.mark("begin", _name, facts={"size": size} if isinstance(size, int) else None)

        def after(*_: Any, _name: str = name, **__: Any) -> None:
            _trace.writer.mark("end", _name)

        if _wrap(target, before, after):
            _trace.wrapped.add(target)


def _wrap(target: str, before: Before | None = None, after: After | None = None) -> bool:
    """Call ``before`` and ``after`` around a function or method of a module that is imported; False if there is none.

    ``before`` may answer other arguments, as a pair; ``after`` gets the result first, and may answer another one.
    """
    found = _find(target)
    if found is None:
        return False
    owner, name, raw = found
    original = raw.__func__ if isinstance(raw, classmethod) else raw

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            with suppress(Exception):
                if (others := before(*args, **kwargs)) is not None:
                    args, kwargs = others
        result = original(*args, **kwargs)
        if after is not None:
            with suppress(Exception):
                changed = after(result, *args, **kwargs)
                result = result if changed is None else changed
        return result

    setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)
    main = sys.modules.get("__main__")
    if getattr(main, name, None) is original:  # launch_server has imported it by name
        setattr(main, name, wrapped)
    return True


def _find(target: str) -> tuple[Any, str, Any] | None:
    """The owner of ``target``, its name there, and what is there."""
    path, _, name = target.rpartition(".")
    owner = sys.modules.get(path)
    if owner is None:
        module, _, cls = path.rpartition(".")
        owner = getattr(sys.modules.get(module), cls, None)
    raw = vars(owner).get(name) if owner is not None else None
    return None if raw is None or owner is None else (owner, name, raw)
