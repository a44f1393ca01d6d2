"""The server's warm-up: SGLang sends itself a request before it calls itself ready.

It compiles what the first request needs, and shows that the engine works. Where the same start has come that far
before, in the same environment and with the same compiled kernels, neither is news: the server is then ready when it
listens.
That an earlier start did is a file in the folder of the compiled kernels (``Directive.warmed``), which goes with them.
What SGLang does after a warm-up, such as freezing its garbage collectors, it does here as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from weightcache.engine import adapter_server as sglang

logger = logging.getLogger(__name__)

LEVER = "warmup"
LISTEN_SECONDS = 120.0
"""How long SGLang itself waits for its server."""
POLL_SECONDS = 0.02


def hook(warmed: Path, listening: threading.Event | None = None) -> Callable[..., Any]:
    """Around SGLang's ``_wait_and_warmup``, which runs in a thread while the server begins to listen.

    ``listening`` says when it does where its port can be connected to all the time (weightcache.engine.listener).
    """

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        server_args = args[0] if args else kwargs.get("server_args")
        if not sglang.is_own_warmup(kwargs.get("execute_warmup_func")) or not sglang.serves_by_itself(server_args):
            return original(*args, **kwargs)
        if warmed.exists():
            return original(*args, **{**kwargs, "execute_warmup_func": partial(without_requests, listening)})
        return original(*args, **{**kwargs, "execute_warmup_func": _noting(warmed)})

    return around


def without_requests(listening: threading.Event | None, server_args: Any) -> bool:
    """Wait until the server listens and declare it ready; if it does not listen, SGLang's requests find out why."""
    if not (listening.wait(LISTEN_SECONDS) if listening else _connects(*sglang.address(server_args))):
        return sglang.own_warmup(server_args)
    logger.info("weightcache: no warm-up request: this start succeeded before, with the same compiled kernels")
    sglang.declare_up()
    return True


def _connects(host: str, port: int) -> bool:
    deadline = time.monotonic() + LISTEN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _noting(warmed: Path) -> Callable[[Any], bool]:
    def warm_up(server_args: Any) -> bool:
        succeeded = sglang.own_warmup(server_args)
        if succeeded:
            with contextlib.suppress(OSError):  # the next start warms up again
                _note(warmed)
        return succeeded

    return warm_up


def _note(warmed: Path) -> None:
    warmed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = warmed.with_name(f"{warmed.name}.{os.getpid()}")
    new.write_text(f"{time.time():.0f}\n")
    new.replace(warmed)
