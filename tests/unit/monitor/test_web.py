"""HTTP as the exporter speaks it: right for those who scrape, cheap for those who do anything else."""

from __future__ import annotations

import asyncio
import gzip
import time

import pytest
from hypothesis import given, strategies as st

from weightcache.monitor import web
from weightcache.monitor.web import Answer, Request

PAGES: web.Pages = {"/metrics": lambda _: Answer(200, b"m" * 1000, "text/x"), "/health": lambda _: Answer(503, b"no")}


def request(line: str, *headers: str) -> Request | None:
    return web.parse("\r\n".join([line, *headers, "", ""]).encode("latin-1"))


def test_a_scrape() -> None:
    got = request("GET /metrics?name[]=x HTTP/1.1", "Host: a:1", "ACCEPT: text/plain", "Odd: \xff")
    assert got == Request("GET", "/metrics", {"host": "a:1", "accept": "text/plain", "odd": "\xff"})
    whole = web.encode(got, web.answer(got, PAGES))
    head, _, body = whole.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 1000" in head
    assert body == b"m" * 1000


def test_compression_and_head() -> None:
    got = request("GET /metrics HTTP/1.0", "Accept-Encoding: deflate, gzip")
    head, _, body = web.encode(got, web.answer(got, PAGES)).partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body) == b"m" * 1000
    asked = request("HEAD /metrics HTTP/1.1")
    head, _, body = web.encode(asked, web.answer(asked, PAGES)).partition(b"\r\n\r\n")
    assert b"Content-Length: 1000" in head
    assert body == b""


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/ HTTP/1.1", 404),
        ("GET /metrics/../../etc/passwd HTTP/1.1", 404),
        ("GET /%2e%2e/etc/passwd HTTP/1.1", 404),
        ("POST / HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("DELETE /health HTTP/1.1", 405),
        ("GET /health HTTP/1.1", 503),
        ("GET http://a/metrics HTTP/1.1", 400),
        ("GET /metrics HTTP/2", 400),
        ("GET /metrics", 400),
        ("get /metrics HTTP/1.1", 400),
        ("GET /met rics HTTP/1.1", 400),
        ("GET /\xe4 HTTP/1.1", 400),
        ("", 400),
    ],
)
def test_everything_else_is_refused(line: str, status: int) -> None:
    got = request(line)
    given = web.answer(got, PAGES)
    assert given.status == status
    assert (b"Allow: GET, HEAD" in web.encode(got, given)) == (status == 405)


def test_headers_have_a_colon() -> None:
    assert request("GET /metrics HTTP/1.1", "no header") is None


@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer(garbage: bytes) -> None:
    got = web.parse(garbage + b"\r\n\r\n")
    assert web.encode(got, web.answer(got, PAGES)).startswith(b"HTTP/1.1 ")


def exchange(*sent: bytes) -> tuple[bytes, float]:
    """What a client gets that sends these bytes and then nothing more, and how long it took."""

    async def talk() -> bytes:
        server = await asyncio.start_server(web.Web(PAGES).talk, "127.0.0.1", 0, limit=web.HEAD_BYTES)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for part in sent:
                writer.write(part)
                await writer.drain()
            got = await reader.read()
            writer.close()
        return got

    began = time.monotonic()
    return asyncio.run(talk()), time.monotonic() - began


def test_who_does_not_say_all_in_time_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.2)
    got, seconds = exchange(b"GET /metrics HTTP/1.1\r\n")
    assert got == b""
    assert 0.2 <= seconds < 2


def test_a_body_is_not_read_and_does_not_harm_the_answer() -> None:
    got, _ = exchange(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", b"x" * 100_000)
    assert got.startswith(b"HTTP/1.1 405 ")
    assert got.endswith(b"Only GET and HEAD.\n")
