"""What main process and children have in common: how they park, and how they become what they were parked for."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from weightcache.errors import AgentUnavailable
from weightcache.warm import device
from weightcache.warm.key import changed

LOWEST_FREE = 256
"""Descriptors below are kept free while a child imports: those of the launch come with their numbers."""
TRACING = "weightcache.engine.tracing"
"""Imported when SGLang and torch are: it needs both."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL as soon as ``parent`` is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def quiet_interrupt() -> None:
    """Ctrl-C reaches parked processes too, and they end without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def usual_interrupt() -> None:
    """Python's own handler, as in a process that just began."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def bring_in(modules: Sequence[str], facts: str) -> None:
    """Import ``modules``. Raises AgentUnavailable if that cannot be done, or initialises CUDA."""
    try:
        cuda = importlib.import_module("torch").cuda
    except ImportError:
        cuda = None
    try:
        known = device.read(facts)
        driver = device.triton_driver() if known.devices else None
        with device.answering(known, cuda, driver) if cuda else contextlib.nullcontext():
            for name in modules:
                importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  anything may come out of other people's modules
        raise AgentUnavailable(f"importing SGLang failed ({type(error).__name__}: {error})") from None
    importlib.import_module(TRACING)
    if cuda and cuda.is_initialized() and device.has_context():
        raise AgentUnavailable("importing SGLang made a CUDA context, and a parked process must hold no GPU memory")


def handed_over() -> None:
    """Tell the trace that this process's start begins now."""
    sys.modules[TRACING].begin()


def stale(since: float) -> str:
    """The first file of an imported module that changed after ``since`` (time.time()), or is gone; empty for none."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.startswith("/"):
            continue
        try:
            written = os.stat(path).st_ctime  # what pip installs can have any modification time
        except OSError:
            return path
        if written > since:
            return path
    return ""


def packages() -> frozenset[tuple[str, int]]:
    """The records of installed distributions, and when they were made: plugins are found through them."""
    found = set()
    for place in {entry for entry in sys.path if entry}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if entry.name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")):
                    found.add((entry.path, entry.stat().st_ctime_ns))
    return frozenset(found)


def adopt(began_with: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Have ``environment`` instead of ``began_with``, under which this process began: what imports set stays."""
    for name in changed(began_with, environment):
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)


def take_over(fds: Mapping[int, int]) -> None:
    """Put received descriptors (values) at their numbers (keys), and close the received ones."""
    for number, fd in fds.items():
        os.dup2(fd, number, inheritable=True)
    for fd in fds.values():
        os.close(fd)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


def moved_up(sock: socket.socket) -> socket.socket:
    """The same socket, at a number that no launch will ask for."""
    high = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_FREE)
    sock.close()
    return socket.socket(fileno=high)
