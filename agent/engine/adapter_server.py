"""SGLang's names around its HTTP server's start, for 0.5.17 and 0.5.23; the rest of them is in adapter.py."""

from __future__ import annotations

import sys
import urllib.parse
from typing import Any

from weightcache.engine import adapter

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
WAIT_AND_WARMUP = f"{HTTP_SERVER}._wait_and_warmup"
SERVER_STARTUP = "uvicorn.server.Server.startup"


def is_own_warmup(function: Any) -> bool:
    """Whether ``function`` is the request that SGLang sends to itself, and not a caller's replacement of it."""
    return function is None or function is sys.modules[HTTP_SERVER]._execute_server_warmup


def own_warmup(server_args: Any) -> bool:
    """Send that request and wait for its answer; False if it failed, which ends the server."""
    return bool(sys.modules[HTTP_SERVER]._execute_server_warmup(server_args))


def serves_by_itself(server_args: Any) -> bool:
    """Whether this engine answers requests alone; others are warmed up in ways of their own."""
    return (
        adapter.resolved(server_args, "disaggregation_mode") in (None, "null")
        and adapter.resolved(server_args, "tokenizer_worker_num") in (None, 1)
        and not adapter.resolved(server_args, "debug_tensor_dump_input_file")
    )


def address(server_args: Any) -> tuple[str, int]:
    """Where this engine listens, as it reaches itself."""
    url = urllib.parse.urlsplit(server_args.url())
    return url.hostname or "127.0.0.1", url.port or 80


def declare_up() -> None:
    """What a successful warm-up does besides: /health answers from now on."""
    module = sys.modules[HTTP_SERVER]
    module._global_state.tokenizer_manager.server_status = module.ServerStatus.Up


def is_engines(server: Any) -> bool:
    """Whether this uvicorn server is the one that answers for the engine."""
    module = sys.modules.get(HTTP_SERVER)
    return module is not None and server.config.app is module.app


def say_started(server: Any, listener: Any) -> None:
    """uvicorn's own line, which it leaves to its caller when it is given a socket."""
    if (say := getattr(server, "_log_started_message", None)) is not None:
        say([listener])
