"""Requests of an engine in a slot: who may ask now, which of them run, and how they end when it retires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from weightcache.engine import adapter_slot as sglang

RETRY_SECONDS = 1
FRESH_SECONDS = 0.5
"""How long a connection may be open without a request before it is closed."""
ANSWER_SECONDS = 5.0
"""How long aborted requests may need to be answered."""
CUT_SECONDS = 1.0
_POLL_SECONDS = 0.02
_ABORT_AGAIN_SECONDS = 0.25
RETIRING = "This engine is retiring: try again."
_BODY = b'{"error":{"message":"This engine is retiring: try again.","type":"unavailable","code":503}}'

Send = Callable[[Any], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Call:
    """A request that runs. ``replaced``: it was answered with 503, and what the application sends is dropped."""

    task: asyncio.Task[Any] | None
    started: bool = False
    replaced: bool = False


class Requests:
    """An ASGI application around the engine's. Belongs to the server's event loop.

    ``public``: open while the engine is active; draining while it retires and its requests may still end; else closed,
    and whatever comes or begins to be answered gets 503. Over the private socket everything may be asked until the
    engine is ``warm``; later only what generates nothing.

    A response may be computed in the background, when no call runs any more or before its first token: what reaches the
    schedulers passes ``around_send``, which is the gate that counts. It is here, since ranks that closed one of their
    own, each at its moment, would not compute the same batches.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.public: Literal["open", "draining", "closed"] = "closed"
        self.warm = False
        self._warming = 0
        self._calls: set[_Call] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, or the application's lifespan."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif not self._may_ask(scope):
            await _unavailable(scope, receive, send)
        elif sglang.is_public(scope):
            await self._run(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def around_send(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        """Around what sends a request to the schedulers, in the server's event loop."""
        if sglang.is_work(request):
            if not self.warm:
                self._warming += sglang.tokens_of(manager, request)
                if self._warming > (room := sglang.room_of(manager)):
                    raise sglang.unsent(f"before an engine in a slot is ready it has room for {room} tokens, not more")
            elif self.public == "closed":
                raise sglang.unsent(RETIRING)
        return original(manager, request)

    def _may_ask(self, scope: Any) -> bool:
        if sglang.is_public(scope):
            return self.public != "closed"
        return not self.warm or _looks(scope)

    async def _run(self, scope: Any, receive: Any, send: Send) -> None:
        call = _Call(asyncio.current_task())

        async def sending(message: Any) -> None:
            if call.replaced:
                return
            if message["type"] == "http.response.start":
                if self.public == "closed":
                    call.replaced = True
                    await _answer(send)
                    return
                if self.public == "draining":
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            call.started = True
            await send(message)

        self._calls.add(call)
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if self.public != "closed" or call.started or call.replaced or scope["type"] != "http":
                raise
            call.replaced = True
            await _answer(send)
        finally:
            self._calls.discard(call)

    async def drain(self, server: Any, seconds: float) -> bool:
        """Let what runs end, in the background as well, and close connections behind it.

        False if some still run after ``seconds``.
        """
        self.public = "draining"
        return await self._until_gone(server, seconds)

    async def abort(self, server: Any) -> int:
        """Answer everything that still runs with 503 if it has no answer yet, and close. The number of those.

        Nothing is sent to the schedulers any more, and what they have is aborted.
        """
        self.public = "closed"
        number = max(len(self._calls), sglang.known())
        deadline = time.monotonic() + ANSWER_SECONDS
        while (self._calls or sglang.known()) and time.monotonic() < deadline:
            sglang.abort_all()  # again for those that had not got as far as the scheduler
            await self._until_gone(server, _ABORT_AGAIN_SECONDS)
        for call in self._calls:
            if call.task is not None:
                call.task.cancel()
        if not await self._until_gone(server, CUT_SECONDS):
            for connection in sglang.public_connections(server):
                sglang.cut(connection)
        return number

    async def _until_gone(self, server: Any, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        seen: dict[Any, float] = {}
        while True:
            now = time.monotonic()
            connections = sglang.public_connections(server)
            for connection in connections:
                if not sglang.is_fresh(connection) or now - seen.setdefault(connection, now) >= FRESH_SECONDS:
                    sglang.let_go(connection)
            if not connections and not self._calls and not sglang.known():
                return True
            if now >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)


def _looks(scope: Any) -> bool:
    """Whether a request generates nothing. SGLang's health checks generate a token."""
    return scope["type"] == "http" and scope["method"] == "GET" and not scope["path"].startswith("/health")


async def _unavailable(scope: Any, receive: Any, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1012})
        return
    while (await receive()).get("more_body"):
        pass  # who closes before a request is read may lose the answer
    await _answer(send)


async def _answer(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_BODY)).encode()),
        (b"retry-after", str(RETRY_SECONDS).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})
