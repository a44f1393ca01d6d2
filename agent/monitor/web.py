"""Just enough HTTP for a scrape: one request a connection, then it is closed.

One thread serves all. Who is slow, silent or wrong costs a few kilobytes for a few seconds and keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate

HEAD_BYTES = 16 * 1024
"""The longest request line with all headers."""

REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 10.0
LINGER_SECONDS = 1.0
"""How long the client may take to say all, to read the answer, and to close."""

MOST = 256
"""Open connections; one more ends the oldest."""

_REQUEST = re.compile(r"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body, and its content type."""

    status: int
    body: bytes
    type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[Request], Answer]]
"""What makes the answer to GET and HEAD, by path. Must not wait for anything."""


class Web:
    """Serves ``pages``; ``talk`` is asyncio.start_server()'s callback."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self._open[writer] = None
        if len(self._open) > MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            # Whatever a client does ends here: it left, it was aborted, it took too long.
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                await self._talk(reader, writer)
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            try:
                request = parse(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.LimitOverrunError:
                request = None
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(encode(request, answer(request, self._pages)))
            await writer.drain()
            writer.write_eof()
        # Closing with something unread would reset the connection, and the answer might be lost.
        async with asyncio.timeout(LINGER_SECONDS):
            while await reader.read(HEAD_BYTES):
                pass


def parse(head: bytes) -> Request | None:
    """The request that starts with ``head``; None if it is not one."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None or not all(":" in line for line in lines):
        return None
    pairs = (line.partition(":") for line in lines)
    return Request(match[1], match[2].partition("?")[0], {name.lower(): value.strip() for name, _, value in pairs})


def answer(request: Request | None, pages: Pages) -> Answer:
    """What a request gets."""
    if request is None:
        return Answer(400, b"This is no request that is understood here.\n")
    if request.path not in pages:
        return Answer(404, f"There is only {' and '.join(pages)}.\n".encode())
    if request.method not in ("GET", "HEAD"):
        return Answer(405, b"Only GET and HEAD.\n")
    return pages[request.path](request)


def encode(request: Request | None, given: Answer) -> bytes:
    """The bytes of an answer, compressed where the client likes that; for HEAD without the body."""
    headers = request.headers if request else {}
    zipped = "gzip" in headers.get("accept-encoding", "")
    body = gzip.compress(given.body, 5, mtime=0) if zipped else given.body
    lines = [
        f"HTTP/1.1 {given.status} {http.HTTPStatus(given.status).phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {given.type}",
        f"Content-Length: {len(body)}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["Content-Encoding: gzip"] if zipped else []),
        *(["Allow: GET, HEAD"] if given.status == 405 else []),
    ]
    head = "\r\n".join([*lines, "", ""]).encode()
    return head if request and request.method == "HEAD" else head + body
