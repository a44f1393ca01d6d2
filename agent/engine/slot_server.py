"""The main process of an engine in a slot: up on a private socket, elected by a lock, and on the public port by order.

The listening socket of the public port is shared with the other slot's engine: nothing here may shut it down. Closing
this process's descriptor is enough, since connections that nobody accepted stay in the socket's queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from weightcache.engine import adapter_server, adapter_slot as sglang, private
from weightcache.engine.election import Election
from weightcache.engine.slot_channel import MAIN, Channel, Handler, timed
from weightcache.engine.slot_requests import Requests
from weightcache.errors import WeightcacheError
from weightcache.standby.messages import Accept, Elect, Ready, Retire, Slot, Yield

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 120.0
"""How long SGLang itself waits for its server."""
LOOP_SECONDS = 30.0
"""How long an order's work in the event loop may take, beyond what it waits for by order."""
FLUSH_SECONDS = 10.0
BEAT_SECONDS = 1.0
SETTLE_SECONDS = 0.02

_T = TypeVar("_T")


class SlotServer:
    """Joins the launcher at once. Raises a WeightcacheError."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.listening = threading.Event()
        """Set when the server is up on its private socket."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None
        self._requests: Requests | None = None
        self._accepting: Any = None
        self._election = Election(Path(slot.lock))
        handlers: dict[type[Any], Handler] = {
            Elect: self._elect,
            Accept: self._accept,
            Retire: self._retire,
            Yield: self._yield,
        }
        self._channel = Channel(slot.channel, MAIN, handlers, beside=(Elect,))

    async def around_startup(self, original: Callable[..., Awaitable[None]], server: Any, sockets: Any = None) -> None:
        """Around uvicorn's ``Server.startup``; other servers (a sidecar, a metrics page) bind their own."""
        if sockets is not None or not adapter_server.is_engines(server):
            await original(server, sockets)
            return
        try:
            listener = private.listen(Path(self._slot.private))  # closed by the event loop's server
        except (WeightcacheError, OSError) as error:
            raise SystemExit(f"weightcache: no private socket: {error}") from None
        await sglang.start(original, server, listener, self._around_app)
        self._loop, self._server = asyncio.get_running_loop(), server
        self._beat(self._loop)
        self.listening.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Again and again, as long as the event loop comes round."""
        self._channel.beat()
        loop.call_later(BEAT_SECONDS, self._beat, loop)

    def around_warm_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around SGLang's ``_wait_and_warmup``, which runs in a thread while the server begins to listen."""
        server_args = args[0] if args else kwargs["server_args"]
        sglang.ask_privately(server_args, Path(self._slot.private))
        result = original(*args, **kwargs)
        if sglang.is_up() and self.listening.wait(LISTEN_SECONDS) and self._requests is not None:
            self._requests.warm = True
            self._channel.send(Ready())
        return result

    def around_send(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        """Around what sends a request to the schedulers; before the server is up, that warms it up."""
        if self._requests is None:
            return original(manager, request)
        return self._requests.around_send(original, manager, request)

    def _around_app(self, app: Any) -> Requests:
        self._requests = Requests(app)
        return self._requests

    def _elect(self, _: Elect, __: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        with timed(seconds, "lock"):
            self._election.win()
        return seconds

    def _yield(self, _: Yield, __: int) -> dict[str, float]:
        if self._accepting is not None:
            raise WeightcacheError("this engine accepts requests, and keeps the lock as long as it does")
        self._election.give_up()
        return {}

    def _accept(self, _: Accept, fd: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        listener = socket.socket(fileno=fd)
        try:
            if not self._election.won:
                raise WeightcacheError("this engine was not elected, and accepts nothing")
            if self._accepting is not None:
                raise WeightcacheError("this engine accepts requests already")
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise WeightcacheError("what came with the order does not listen")
            with timed(seconds, "accept"):
                self._in_loop(self._accept_on(listener), LOOP_SECONDS)
        except BaseException:
            listener.close()
            raise
        return seconds

    async def _accept_on(self, listener: socket.socket) -> None:
        if self._requests is not None:
            self._requests.public = "open"
        self._accepting = await sglang.accept(self._server, listener)

    def _retire(self, order: Retire, _: int) -> dict[str, float]:
        return self._in_loop(self._retired(order.seconds), order.seconds + LOOP_SECONDS + FLUSH_SECONDS)

    async def _retired(self, limit: float) -> dict[str, float]:
        seconds: dict[str, float] = {}
        if self._accepting is not None:
            sglang.accept_no_more(self._server, self._accepting)
            self._accepting = None
            # The event loop has taken connections of which the server is told in a later round.
            await asyncio.sleep(SETTLE_SECONDS)
        if (requests := self._requests) is not None:
            aborted = 0
            with timed(seconds, "drain"):
                ended = await requests.drain(self._server, limit)
            with timed(seconds, "abort"):
                aborted = await requests.abort(self._server)
            logger.info("weightcache: accepts no more: %s", "all requests ended" if ended else f"{aborted} aborted")
        with timed(seconds, "flush"):
            try:
                flushed = await sglang.flush(FLUSH_SECONDS)
            except TimeoutError:
                raise WeightcacheError("the schedulers do not answer, and prefixes cannot be forgotten") from None
            if not flushed:
                raise WeightcacheError("requests still run, and prefixes cannot be forgotten")
        return seconds

    def _in_loop(self, work: Coroutine[Any, Any, _T], limit: float) -> _T:
        """Run ``work`` in the server's event loop. Raises a WeightcacheError if it takes longer than ``limit``."""
        if self._loop is None:
            work.close()
            raise WeightcacheError("the HTTP server is not up yet")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except TimeoutError:
            future.cancel()
            raise WeightcacheError(f"the HTTP server did not carry it out within {limit:g} s") from None
