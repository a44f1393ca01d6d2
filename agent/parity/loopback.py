"""SGLang's HTTP server on a loopback port, with a key that nobody else has: how the commands that start one ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket

from weightcache.parity import ending

HOST = "127.0.0.1"
READY_SECONDS = 5.0
FAILURES = (OSError, ValueError, http.client.HTTPException)
"""What ``Client.ask`` raises."""

_MOST_ANSWER = 16 << 20


class Client:
    """For one server, which is to be started with ``port`` and ``key``: the port was free just now."""

    def __init__(self) -> None:
        self.port = _free_port()
        # Hexadecimal: argparse takes a key that begins with a dash for an option.
        self.key = secrets.token_hex(32)

    def answers(self) -> bool:
        """Whether the server takes requests."""
        try:
            self.ask("GET", "/model_info", seconds=READY_SECONDS)
        except FAILURES:
            return False
        return True

    def ask(self, verb: str, path: str, body: object = None, *, seconds: float) -> bytes:
        """The body of an answer with status 200; the server has ``seconds`` for each step of it.

        Raises OSError, HTTPException, or ValueError for any other status; Ended as in ``ending.wait``.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        content = None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=seconds)
        with contextlib.closing(connection), ending.wait():
            connection.request(verb, path, content, headers)
            response = connection.getresponse()
            data = response.read(_MOST_ANSWER)
            if response.status != http.client.OK:
                raise ValueError(f"{path} answered {response.status}: {data[:200].decode(errors='replace')}")
            return data


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
