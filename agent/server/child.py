"""One role of the loader's command, run elsewhere: under systemd in a unit of its own, else in a process of its own.

The agent only holds a connection (loader/unit.py is at its other end): output, signs of life and the end come as
messages, and closing the connection ends the command with all its descendants.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from weightcache import protocol, transport
from weightcache.errors import AgentUnavailable, LoadFailed, ProtocolError, WeightcacheError
from weightcache.protocol import Alive, Ended, Output, Run
from weightcache.server.waiting import first

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

KEPT_LINES = 20
CONNECT_SECONDS = 5.0
STOP_SECONDS = 15.0
_PRIVATE = ("LISTEN_", "NOTIFY_", "WATCHDOG_", "FDSTORE")
_ADVICE = (
    "; edit loader.command in weightcache.toml: it names the Python of your SGLang environment, with weightcache in it"
)
_UNIT = "import sys; sys.path[:] = {path!r}; from weightcache.loader.unit import main; sys.exit(main())"


class Child:
    """A running command. ``exited`` is set once it and everything that belonged to it are gone.

    ``signs`` counts its signs of life: output, CPU time, I/O, processes that come and go.
    """

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes] | None, on_line: Callable[[str], None]
    ) -> None:
        self.exited = asyncio.Event()
        self.lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.status: int | None = None
        self.signs = 0
        self._reason = ""
        self._channel = transport.AsyncChannel(sock)
        self._process = process
        self._on_line = on_line
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def describe(self) -> str:
        """How it ended, in words, with its last lines."""
        if not self.exited.is_set():
            how = "does not end"
        elif self._reason:
            how = self._reason
        elif self.status is None:
            how = "ended without a word (killed for memory, or never started: journalctl -u 'weightcache-loader@*')"
        elif self.status < 0:
            how = f"ended with signal {-self.status} ({_signal_name(-self.status)})"
        else:
            how = f"ended with status {self.status}"
        return f"{how}{self.last_words()}{_ADVICE if self._wrong else ''}"

    @property
    def _wrong(self) -> bool:
        """Whether this was no loader: it could not be started, or its Python has no weightcache."""
        unknown = "No module named 'weightcache'"
        return self._reason.startswith("cannot be started") or any(unknown in line for line in self.lines)

    def last_words(self) -> str:
        """The last lines of output, ready to follow a sentence."""
        return ": " + " | ".join(list(self.lines)[-5:]) if self.lines else ""

    async def stop(self) -> None:
        """End the command: SIGTERM, some seconds, SIGKILL, all of it done at the other end."""
        if not self.exited.is_set():
            with contextlib.suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_WR)
            await first(self.exited, seconds=STOP_SECONDS)
        if not self.exited.is_set():  # a supervisor that does not do its work
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._gone(kill=True)

    async def _listen(self) -> None:
        try:
            while packet := (await self._channel.receive()).data:
                self._take(protocol.decode(packet))
                await asyncio.sleep(0)  # a flood of output must not keep the event loop to itself
        except (OSError, ProtocolError) as error:
            self._reason = f"broke off the conversation ({error})"
        await self._gone()

    def _take(self, message: protocol.Message) -> None:
        match message:
            case Output(lines):
                self.signs += 1
                self.lines.extend(lines)
                for line in lines:
                    self._on_line(line)
            case Alive():
                self.signs += 1
            case Ended(status, reason):
                self.status = status
                self._reason = f"cannot be started ({reason})" if reason else ""
            case _:
                raise ProtocolError(f"{type(message).__name__} from a loader's supervisor")

    async def _gone(self, kill: bool = False) -> None:
        self._channel.close()
        if self._process is not None:
            if kill:
                self._process.kill()
            # It has closed the connection, which is the last thing it does.
            await asyncio.to_thread(self._process.wait)
        self.exited.set()


async def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    loader_socket: Path | None,
    signs: bool = True,
) -> Child:
    """Run ``command`` with ``environment`` added, behind ``loader_socket`` or in a process here. Raises LoadFailed.

    Without ``signs`` it is not looked at beside its output.
    """
    request = protocol.encode(Run(tuple(command), dict(environment), signs))
    process = None
    try:
        if loader_socket is None:
            sock, process = _process()
        else:
            sock = await asyncio.to_thread(_connect, loader_socket)
    except (OSError, WeightcacheError) as error:
        raise LoadFailed(f"nobody can run the loader: {error}") from None
    child = Child(sock, process, on_line)
    try:
        transport.send_packet(sock, request)
    except (OSError, ProtocolError) as error:
        await child.stop()
        raise LoadFailed(f"the loader's supervisor takes no request: {error}") from None
    return child


def _process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            # A session of its own: a Ctrl+C at the agent's terminal is for the agent, which then ends this in order.
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _UNIT.format(path=sys.path)],
                env={name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)},
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def _connect(path: Path) -> socket.socket:
    sock = transport.connect(path, time.monotonic() + CONNECT_SECONDS)
    _, uid, _ = transport.peer_credentials(sock)
    if uid not in (0, os.geteuid()):
        sock.close()
        raise AgentUnavailable(f"the socket {path} belongs to uid {uid}, which is not systemd")
    return sock


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
