"""Runs one role of the loader's command for the agent at the other end of the connection on standard input.

Under systemd this is ``weightcache-loader@.service``: one process for each connection to weightcache-loader.socket,
with its own user, cgroup and sandbox. Elsewhere the agent starts it itself, with one end of a socket pair. The
conversation is the same: Run comes in; Output, Alive and, at the end, Ended go out. A connection that ends stops
everything, so no loader outlives the agent that asked for it. Standard library only: the loader's own environment may
be broken.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import IO, cast

from weightcache import protocol, transport
from weightcache.errors import ProtocolError, WeightcacheError
from weightcache.loader import vitals
from weightcache.protocol import Alive, Ended, Output, Run

REQUEST_SECONDS = 10.0
SAMPLE_SECONDS = 1.0
TERM_SECONDS = 5.0
LONGEST_LINE = 2000
LINES_AT_ONCE = 12
"""A byte that is no text becomes six in JSON, and a packet with the longest lines has to stay below MAX_PACKET."""

_PRIVATE = ("LISTEN_", "NOTIFY_", "WATCHDOG_", "FDSTORE")
_UTF8 = "utf-8"


class Unit:
    """One child and the connection that it runs for."""

    def __init__(self, connection: socket.socket, request: Run) -> None:
        """Start the command. Raises OSError or ValueError."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
        self._connection = connection
        self._signs = request.signs
        self._process = subprocess.Popen(
            request.command,
            env=own | request.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._output.fileno(), False)
        self._partial = b""
        self._seen: vitals.Vitals | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Serve until the child has ended; returns its status, minus the signal number if it was killed."""
        try:
            return self._run()
        except BaseException:
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)
            raise

    def _run(self) -> int:
        pidfd = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as events, contextlib.closing(self._output):
            events.register(pidfd, selectors.EVENT_READ)
            events.register(self._output, selectors.EVENT_READ)
            events.register(self._connection, selectors.EVENT_READ)
            sampled = 0.0
            while True:
                wait = SAMPLE_SECONDS if self._signs or self._kill_at is not None else None
                ready = {key.fileobj for key, _ in events.select(wait)}
                if self._output in ready and not self._forward():
                    events.unregister(self._output)
                if self._connection in ready and self._over():
                    events.unregister(self._connection)
                    self._stop()
                if pidfd in ready:
                    break
                now = time.monotonic()
                if self._kill_at is not None and now >= self._kill_at:
                    self._signal(signal.SIGKILL)
                if self._signs and now - sampled >= SAMPLE_SECONDS:
                    sampled = now
                    self._sample()
            # Not reaped yet, so the number of the group cannot belong to anybody else: leftovers can be killed safely.
            self._signal(signal.SIGKILL)
            status = self._process.wait()
            os.close(pidfd)
            self._forward()
            self._emit([self._partial])
        return status

    def _stop(self) -> None:
        self._kill_at = time.monotonic() + TERM_SECONDS
        self._signal(signal.SIGTERM)

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, sign)

    def _over(self) -> bool:
        """The agent has nothing more to say, so whatever is readable is the end of the conversation."""
        with contextlib.suppress(OSError, ProtocolError):
            return not transport.receive_packet(self._connection).data
        return True

    def _forward(self) -> bool:
        """Pass on what the child wrote; False at the end of its output."""
        try:
            data = os.read(self._output.fileno(), 65536)
        except BlockingIOError:
            return True
        *whole, rest = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
        self._partial = rest[-LONGEST_LINE:]
        self._emit(whole)
        return bool(data)

    def _emit(self, lines: list[bytes]) -> None:
        readable = [text for line in lines if (text := _readable(line))]
        for start in range(0, len(readable), LINES_AT_ONCE):
            self._tell(Output(tuple(readable[start : start + LINES_AT_ONCE])))

    def _sample(self) -> None:
        sample = vitals.of_session(self._process.pid)
        if sample != self._seen:
            self._seen = sample
            self._tell(Alive(*sample))

    def _tell(self, message: protocol.Message) -> None:
        with contextlib.suppress(OSError):  # an agent that is gone shows as the end of the connection
            transport.send_packet(self._connection, protocol.encode(message))


def _readable(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode(_UTF8, "replace").rstrip()
    return "".join(char if char.isprintable() else " " for char in text).strip()


def serve(connection: socket.socket) -> int:
    """Serve one connection to its end; the exit status. Raises ProtocolError for anything but one Run."""
    connection.settimeout(REQUEST_SECONDS)
    try:
        packet = transport.receive_packet(connection)
    except OSError as error:
        raise ProtocolError(f"no request from the agent ({error})") from None
    if not packet.data:
        return 0
    request = protocol.decode(packet.data)
    if not isinstance(request, Run) or not request.command:
        raise ProtocolError(f"{type(request).__name__} where the agent has to say what to run")
    # Output waits for an agent that is slow to read; the child waits in turn.
    connection.settimeout(None)
    try:
        unit = Unit(connection, request)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        ended = Ended(None, f"{request.command[0][:500]!r}: {reason}"[:1000])
    else:
        ended = Ended(unit.run())
    with contextlib.suppress(OSError):
        transport.send_packet(connection, protocol.encode(ended))
    return 0


def main() -> int:
    """Serve the connection on standard input."""
    # Signals meant to stop this process stop the child in order: the connection's other end closes, or systemd kills.
    try:
        connection = socket.socket(fileno=os.dup(0))
    except OSError:
        print("weightcache-loader: standard input is no connection to an agent", file=sys.stderr)
        return 2
    with connection:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_SEQPACKET:
            print("weightcache-loader: standard input is no connection to an agent", file=sys.stderr)
            return 2
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        try:
            return serve(connection)
        except WeightcacheError as error:
            print(f"weightcache-loader: {error}", file=sys.stderr)
            return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
