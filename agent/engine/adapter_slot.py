"""Names of SGLang and uvicorn for an engine in a slot, for SGLang 0.5.17 and 0.5.23 with uvicorn 0.51 and later."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from weightcache.engine import adapter, adapter_kv, adapter_phases, private
from weightcache.engine.adapter_server import HTTP_SERVER, say_started

INPUT = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
"""Called by each event loop in each round, whether something came or not."""
RANK_KNOWN = adapter_phases.RANK_KNOWN
SEND = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
"""By it goes all that the main process has schedulers generate, one after the other with aborts and the flush."""
WORK = frozenset(
    ("TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput", "TokenizedEmbeddingReqInput",
     "BatchTokenizedEmbeddingReqInput")
)  # fmt: skip
"""Requests that use KV memory, by the names of their types; scores are embeddings or one token."""
_UNLIMITED = 1 << 40
FIRST_STATES = 16
"""How many states have memory before an engine owns it, of a model that keeps a state for each request."""
_STATES_OF_A_REQUEST = 8
"""At most: its own, those that it is computed ahead in, and those that the prefix cache keeps of it."""

REFUSED_ARGUMENTS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    # (argument, values with which an engine may be in a slot, why not with others)
    ("tokenizer_worker_num", (None, 1), "its HTTP workers are processes of their own, which nobody directs"),
    ("enable_http2", (None, False), "its HTTP server is not the one that can be handed a socket later"),
    ("grpc_mode", (None, False), "a gRPC server cannot be handed a socket"),
    ("smg_grpc_mode", (None, False), "a gRPC server cannot be handed a socket"),
    ("grpc_port", (None,), "a gRPC server has a port of its own, which only one of two engines can have"),
    ("kv_events_config", (None, ""), "it names a port that both engines would bind"),
    ("load_publish_endpoint", (None, "", "off"), "both engines would bind the same ports"),
    ("gated_launch_port", (None,), "both engines would bind it"),
    ("disaggregation_mode", (None, "null"), "others know a prefill or decode server by ports of its own"),
    ("enable_dp_attention", (None, False), "its internal ports follow from --port, which both engines share"),
    ("nnodes", (None, 1), "the engines of a slot run on one host"),
    ("warmups", (None,), "what they compute needs KV memory, which a standby does not have"),
)


def refused(server_args: Any) -> str:
    """The first argument with which an engine cannot be in a slot, and why; or an empty text."""
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        return "SGLANG_RUST_SERVER: an engine in a slot needs the HTTP server of Python"
    for name, harmless, why in REFUSED_ARGUMENTS:
        if adapter.resolved(server_args, name) not in harmless:
            return f"--{name.replace('_', '-')} in a slot: {why}"
    return ""


def global_rank_of(scheduler: Any) -> int:
    """The rank among all of the engine's, those of other data parallel replicas included."""
    rank, replica = adapter_phases.rank_of(scheduler)
    world = int(adapter.resolved(scheduler.server_args, "pp_size") or 1) * int(
        adapter.resolved(scheduler.server_args, "tp_size") or 1
    )
    return replica * world + rank


def ask_privately(server_args: Any, path: Path) -> None:
    """Whatever the HTTP server's own code asks of its public address goes over the Unix socket at ``path``."""
    module: Any = sys.modules[HTTP_SERVER]
    if not isinstance(module.requests, private.Requests):
        module.requests = private.Requests(module.requests, server_args.url(), path)


def is_up() -> bool:
    """Whether SGLang calls its server ready."""
    module = sys.modules[HTTP_SERVER]
    return bool(_manager().server_status == module.ServerStatus.Up)


def abort_all() -> None:
    """Abort every request; each is answered as aborted. In the server's event loop."""
    _manager().abort_request(abort_all=True)


def is_work(request: Any) -> bool:
    """Whether what is sent to schedulers has them use KV memory."""
    return type(request).__name__ in WORK


def first_tokens(model_config: Any) -> int:
    """How many tokens SGLang's own warm-up may need: a sentence, or an image that some models cut into many parts."""
    return 8192 if model_config.is_multimodal else 1024


def room_of(manager: Any) -> int:
    """How many tokens have KV memory before an engine owns it, in all of its data parallel replicas.

    SGLang's warm-up asks each of them once.
    """
    return first_tokens(manager.model_config) * int(adapter.resolved(manager.server_args, "dp_size") or 1)


def tokens_of(manager: Any, request: Any) -> int:
    """How many tokens of KV memory are taken at most by what ``is_work``.

    A state of a request counts as so many tokens that both have room in the same way.
    """

    def drafted(name: str) -> int:
        return int(adapter.resolved(manager.server_args, f"speculative_{name}") or 0)

    # Up to two pages begun: the last one, and that of a token which is computed ahead; and what a draft guesses.
    begun = 2 * int(adapter.resolved(manager.server_args, "page_size") or 1)
    begun += 2 * max(drafted("num_draft_tokens"), drafted("eagle_topk") * drafted("num_steps"))
    states = adapter_kv.has_states(manager.model_config)
    least = first_tokens(manager.model_config) * _STATES_OF_A_REQUEST // FIRST_STATES if states else 0
    found = 0
    for one in getattr(request, "batch", (request,)):
        given = one.input_embeds if one.input_ids is None else one.input_ids
        tokens = len(given) + begun
        if "Generate" in type(one).__name__:
            limit = one.sampling_params.max_new_tokens
            tokens += _UNLIMITED if limit is None else limit
        found += max(tokens, least)
    return found


def unsent(why: str) -> Exception:
    """What ends a request that is not sent, as SGLang's handlers answer it: without a traceback."""
    return ValueError(why)


def beside_another_engine() -> None:
    """Before SGLang looks at the memory of its GPUs: what the other slot leaves need not be the same on each."""
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


def known() -> int:
    """The number of requests that have begun and not ended, whoever waits for them."""
    return len(_manager().rid_to_state)


async def flush(seconds: float) -> bool:
    """Forget all prefixes, in each data parallel replica; False if requests still ran in one after ``seconds``.

    Raises TimeoutError if one does not answer.
    """
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager = _manager()
    manager.auto_create_handle_loop()
    async with asyncio.timeout(2 * seconds):
        # manager.flush_cache() would look at the first replica's answer alone.
        answers = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=seconds))
    return all(answer.success for answer in answers)


def _manager() -> Any:
    return sys.modules[HTTP_SERVER]._global_state.tokenizer_manager


async def start(original: Callable[..., Awaitable[None]], server: Any, listener: socket.socket, around: Any) -> None:
    """uvicorn's ``Server.startup`` on a Unix socket, without TLS; ``around`` the application sees every request."""
    config = server.config
    config.loaded_app = around(config.loaded_app)
    tls, config.ssl = config.ssl, None
    try:
        await original(server, [listener])
    finally:
        config.ssl = tls


async def accept(server: Any, listener: socket.socket) -> Any:
    """Accept on one more socket, as uvicorn's ``Server.startup`` does; the answer is what closes it."""
    config, loop = server.config, asyncio.get_running_loop()

    def protocol(_loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Protocol:
        made: asyncio.Protocol = config.http_protocol_class(
            config=config, server_state=server.server_state, app_state=server.lifespan.state, _loop=_loop
        )
        return made

    accepting = await loop.create_server(protocol, sock=listener, ssl=config.ssl, backlog=config.backlog)
    server.servers.append(accepting)
    say_started(server, listener)
    return accepting


def accept_no_more(server: Any, accepting: Any) -> None:
    """Close this process's own descriptor of the socket; whoever else has one goes on accepting."""
    server.servers.remove(accepting)
    accepting.close()


def is_public(scope: Any) -> bool:
    """Whether a request came by a TCP port."""
    address = scope.get("server")
    return not address or address[1] is not None


def public_connections(server: Any) -> list[Any]:
    """Those by a TCP port, with or without a request that runs."""
    return [connection for connection in server.server_state.connections if not _is_unix(connection.transport)]


def _is_unix(transport: Any) -> bool:
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


def is_fresh(connection: Any) -> bool:
    """Whether no request came on it yet."""
    return getattr(connection, "cycle", connection) is None


def let_go(connection: Any) -> None:
    """Close it now if it is idle, or after the answer that it waits for. A WebSocket goes on."""
    if not hasattr(connection, "cycle") or connection.transport.is_closing():
        return
    idle = connection.cycle is None or connection.cycle.response_complete
    if not (idle and _has_unread(connection.transport)):
        connection.shutdown()


def _has_unread(transport: Any) -> bool:
    """Whether a request is in the kernel's buffer already: who closes now loses it."""
    with contextlib.suppress(OSError, AttributeError):
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return any(waiting)
    return False


def cut(connection: Any) -> None:
    """Close it at once."""
    connection.transport.abort()
