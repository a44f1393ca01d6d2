"""The service manager at the other end of $NOTIFY_SOCKET (sd_notify(3)): systemd, or `wcache keeper`.

Two ways on purpose. What must arrive (READY, descriptors, barriers) waits for room in the manager's queue, up to a
deadline. What may get lost (STATUS, WATCHDOG) goes through the sdnotify library, without waiting: it swallows errors.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import importlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

from weightcache.errors import WeightcacheError

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

SEND_SECONDS = 60.0
"""How long the manager may leave its queue full: systemd reads nothing during a long daemon-reload."""

RETRY_SECONDS = 0.1


class Manager:
    """Talks to one manager.

    ``limit`` is how many descriptors it keeps, where it says so; ``watchdog`` is the longest silence that it bears, in
    seconds.
    """

    def __init__(self, address: str, notifier: Any, limit: int | None = None, watchdog: float = 0.0) -> None:
        self.limit = limit
        self.watchdog = watchdog
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._notifier = notifier
        self._sock: socket.socket | None = None
        self._listens = True
        self._lock = asyncio.Lock()

    # -- what must arrive ----------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """READY=1: the service is up."""
        await self._send("READY=1")

    async def stopping(self) -> None:
        """STOPPING=1, and EXTEND_TIMEOUT is not asked for: the agent stops in seconds."""
        await self._send("STOPPING=1")

    async def store(self, name: str, fd: int) -> None:
        """Ask the manager to keep ``fd``; it says nothing when it refuses. FDPOLL=0: a driver's descriptor that shows
        an error would be dropped otherwise.
        """
        await self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    async def remove(self, name: str) -> None:
        """Ask the manager to let go of everything it keeps under ``name``."""
        await self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    async def barrier(self, seconds: float = SEND_SECONDS) -> None:
        """Wait until the manager has read everything sent before (BARRIER=1). Raises WeightcacheError."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            try:
                await self._send("BARRIER=1", (writer,))
            finally:
                os.close(writer)
            await _hangup(reader, seconds)
        except TimeoutError:
            raise WeightcacheError(f"the service manager read no messages for {seconds:g} s") from None
        finally:
            os.close(reader)

    # -- what may get lost ---------------------------------------------------------------------------------------------

    def status(self, text: str) -> None:
        """STATUS=: one line for ``systemctl status``."""
        line = "".join(char if " " <= char <= "~" else "?" for char in text)
        self._notifier.notify(f"STATUS={line[:1000]}")

    def extend(self, seconds: float) -> None:
        """EXTEND_TIMEOUT_USEC=: starting goes on; if nothing more is heard for ``seconds``, it failed."""
        self._notifier.notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def alive(self) -> None:
        """WATCHDOG=1."""
        self._notifier.notify("WATCHDOG=1")

    # ------------------------------------------------------------------------------------------------------------------

    async def _send(self, text: str, fds: Sequence[int] = ()) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._lock:
            while True:
                try:
                    self._socket().sendmsg([text.encode()], ancillary, socket.MSG_NOSIGNAL)
                    self._listens = True
                except BlockingIOError:
                    await self._writable(deadline)
                except OSError as error:  # the manager re-executes itself, or has no room for descriptors in flight
                    self.close()
                    # One that was gone for so long is not waited for again: everything waits behind this message.
                    if not self._listens or time.monotonic() > deadline:
                        self._listens = False
                        raise WeightcacheError(f"the service manager cannot be reached: {error}") from None
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    return

    async def _writable(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()
        fd = self._socket().fileno()
        loop.add_writer(fd, lambda: None if room.done() else room.set_result(None))
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await room
        except TimeoutError:
            raise WeightcacheError(f"the service manager read no messages for {SEND_SECONDS:g} s") from None
        finally:
            loop.remove_writer(fd)

    def _socket(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                sock.connect(self._address)
            except BaseException:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def close(self) -> None:
        """Close the socket; the next message opens another one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def manager(environment: MutableMapping[str, str]) -> Manager | None:
    """The manager that started this process, or None. Raises WeightcacheError without the package sdnotify."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    try:
        notifier = importlib.import_module("sdnotify").SystemdNotifier()
    except ImportError as error:
        raise WeightcacheError(f"NOTIFY_SOCKET is set and the package sdnotify is missing ({error})") from None
    if notifier.socket is not None:
        notifier.socket.setblocking(False)
        os.set_inheritable(notifier.socket.fileno(), False)
    del environment["NOTIFY_SOCKET"]
    limit = environment.pop("FDSTORE", "")
    micros, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", str(os.getpid()))
    watchdog = int(micros) / 1e6 if micros.isdecimal() and pid == str(os.getpid()) else 0.0
    return Manager(address, notifier, int(limit) if limit.isdecimal() else None, watchdog)


def hung_up(reader: int) -> bool:
    """Whether the last copy of the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(reader, 0)
    return bool(poll.poll(0))


async def hangs_up(reader: int, seconds: float) -> bool:
    """Whether the last copy of the other end of a pipe is closed, or will be within ``seconds``."""
    with contextlib.suppress(TimeoutError):
        await _hangup(reader, seconds)
    return hung_up(reader)


async def _hangup(reader: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    closed: asyncio.Future[None] = loop.create_future()
    loop.add_reader(reader, lambda: None if closed.done() else closed.set_result(None))
    try:
        # Not wait_for(): until Python 3.12 it loses a cancellation that comes together with the result.
        async with asyncio.timeout(seconds):
            await closed
    finally:
        with contextlib.suppress(OSError):
            loop.remove_reader(reader)
