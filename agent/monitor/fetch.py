"""One small answer over HTTP from a server that may be slow, silent, or somebody else."""

from __future__ import annotations

import http.client
import io
import socket
import time


class _Received:
    """What http.client reads from in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def get(server: tuple[str, int], path: str, seconds: float, most: int) -> bytes:
    """The body of an answer of at most ``most`` bytes. Raises OSError, or HTTPException for anything but 200.

    http.client's own timeout is for one recv(): a server that sends a byte now and then would hold it for ever.
    """
    deadline = time.monotonic() + seconds
    host, port = server
    name = f"[{host}]" if ":" in host else host
    request = f"GET {path} HTTP/1.0\r\nHost: {name}:{port}\r\nAccept: application/json\r\n\r\n"
    data = b""
    with socket.create_connection(server, max(deadline - time.monotonic(), 0.01)) as connection:
        connection.sendall(request.encode())
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = connection.recv(64 * 1024)
            data += chunk
            if not chunk:
                break
            if len(data) > most:
                raise http.client.HTTPException("the answer is too long")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    response.begin()
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"HTTP status {response.status}")
    return response.read()
