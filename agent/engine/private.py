"""The Unix socket that the HTTP server of an engine in a slot listens on from its start, and what asks over it.

SGLang's warm-up asks its own public address, where another engine answers as long as this one is a standby.
"""

from __future__ import annotations

import contextlib
import http.client
import json as encoding
import os
import socket
import stat
import urllib.parse
from pathlib import Path
from types import ModuleType
from typing import Any

from weightcache.errors import WeightcacheError

BACKLOG = 128
CONNECT_SECONDS = 1.0


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, which only this user may connect to. Raises WeightcacheError or OSError."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Before bind: the file gets this mode, and is there with no other one.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(os.fspath(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise WeightcacheError(f"{path} is there, and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        with contextlib.suppress(ConnectionRefusedError):
            probe.connect(os.fspath(path))
            raise WeightcacheError(f"another process listens at {path}")
    path.unlink(missing_ok=True)


class Requests:
    """The module ``requests``, but for what is asked of this server's own address: that goes over its Unix socket."""

    def __init__(self, original: ModuleType, own: str, path: Path) -> None:
        self._original, self._own, self._path = original, own, path

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # while copying, before __init__ ran
            raise AttributeError(name)
        return getattr(self._original, name)

    def get(self, url: str, **kwargs: Any) -> Any:
        """As requests.get()."""
        return self._ask("GET", url, kwargs) if self._is_own(url) else self._original.get(url, **kwargs)

    def post(self, url: str, **kwargs: Any) -> Any:
        """As requests.post()."""
        return self._ask("POST", url, kwargs) if self._is_own(url) else self._original.post(url, **kwargs)

    def _is_own(self, url: str) -> bool:
        return url == self._own or url.startswith(f"{self._own}/")

    def _ask(self, method: str, url: str, given: dict[str, Any]) -> Any:
        if unknown := given.keys() - {"json", "headers", "timeout", "verify"}:
            raise TypeError(f"cannot ask over a Unix socket with {', '.join(sorted(unknown))}")
        headers = dict(given.get("headers") or {})
        body = None
        if (value := given.get("json")) is not None:
            body, headers["Content-Type"] = encoding.dumps(value).encode(), "application/json"
        connection = UnixConnection(self._path, given.get("timeout"))
        try:
            connection.request(method, urllib.parse.urlsplit(url).path or "/", body, headers)
            answer = connection.getresponse()
            response = self._original.Response()
            response.status_code, response.reason, response.url = answer.status, answer.reason, url
            response._content = answer.read()
        except TimeoutError as error:
            raise self._original.exceptions.ReadTimeout(str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._original.exceptions.ConnectionError(str(error)) from error
        finally:
            connection.close()
        return response


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the path in place of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))
