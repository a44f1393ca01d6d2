"""Packets and descriptors: nothing is lost silently, nothing is left open, nothing waits for ever."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightcache import transport
from weightcache.errors import AgentUnavailable, ProtocolError
from weightcache.transport import MAX_FDS, MAX_PACKET, AsyncChannel, connect, receive_packet, send_packet

Pair = tuple[socket.socket, socket.socket]


def open_fds() -> set[int]:
    """Descriptors of this process."""
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


@contextmanager
def no_leak() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() - before == set()


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    b.settimeout(2)
    yield a, b
    a.close()
    b.close()


@contextmanager
def files(count: int) -> Iterator[list[int]]:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    try:
        yield fds
    finally:
        transport.close_all(fds)


def push(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send without asking the rules of this project."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


@pytest.mark.parametrize("count", [0, 1, 2, 250, MAX_FDS])
def test_a_packet_arrives_whole(pair: Pair, count: int) -> None:
    with no_leak(), files(count) as fds:
        send_packet(pair[0], b"x" * 1000, fds)
        packet = receive_packet(pair[1], MAX_FDS)
        assert packet.data == b"x" * 1000
        assert len(packet.fds) == count
        for fd in packet.fds:
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev
        packet.close()


def test_packets_keep_their_borders(pair: Pair) -> None:
    for size in (1, 5, MAX_PACKET):
        send_packet(pair[0], bytes(size))
    assert [len(receive_packet(pair[1]).data) for _ in range(3)] == [1, 5, MAX_PACKET]


def test_end_of_file_is_an_empty_packet(pair: Pair) -> None:
    pair[0].close()
    assert receive_packet(pair[1], 5).data == b""


@pytest.mark.parametrize(("size", "count"), [(0, 0), (MAX_PACKET + 1, 0), (1, MAX_FDS + 1)])
def test_what_cannot_be_sent_is_not_tried(pair: Pair, size: int, count: int) -> None:
    with pytest.raises(ProtocolError, match="cannot send a packet"):
        send_packet(pair[0], bytes(size), [0] * count)


def test_an_oversized_packet_is_refused_with_its_descriptors(pair: Pair) -> None:
    with no_leak(), files(3) as fds:
        push(pair[0], bytes(MAX_PACKET + 1), fds)
        with pytest.raises(ProtocolError, match=f"larger than {MAX_PACKET} bytes"):
            receive_packet(pair[1], 10)
        push(pair[0], bytes(MAX_PACKET + 5000), fds)
        with pytest.raises(ProtocolError, match="larger"):
            receive_packet(pair[1], 10)


@pytest.mark.parametrize(("sent", "room"), [(3, 1), (2, 1), (5, 2), (253, 100)])
def test_more_descriptors_than_expected_are_refused_and_closed(pair: Pair, sent: int, room: int) -> None:
    with no_leak(), files(sent) as fds:
        push(pair[0], b"data", fds)
        with pytest.raises(ProtocolError):
            receive_packet(pair[1], room)


@pytest.mark.parametrize("sent", [1, 2, 100])
def test_where_none_are_expected_none_arrive(pair: Pair, sent: int) -> None:
    with no_leak(), files(sent) as fds:
        push(pair[0], b"data", fds)
        assert receive_packet(pair[1]).fds == ()
        pair[0].close()
        assert receive_packet(pair[1]).data == b""


def test_an_empty_packet_brings_nothing(pair: Pair) -> None:
    with no_leak(), files(2) as fds:
        push(pair[0], b"", fds)
        with pytest.raises(ProtocolError, match="where none were expected"):
            receive_packet(pair[1], 10)


def test_too_few_free_descriptors_fail_the_exchange(pair: Pair) -> None:
    """The kernel drops what does not fit (MSG_CTRUNC); what did arrive must not stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with no_leak(), files(20) as fds:
        push(pair[0], b"data", fds)
        used = open_fds()
        free = [number for number in range(1000) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[7], hard))
        try:
            with pytest.raises(ProtocolError, match="descriptors were lost on the way"):
                receive_packet(pair[1], MAX_FDS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_received_descriptors_are_not_inherited(pair: Pair) -> None:
    with files(1) as fds:
        os.set_inheritable(fds[0], True)
        send_packet(pair[0], b"x", fds)
        packet = receive_packet(pair[1], 1)
        script = f"import os; print(os.path.exists('/proc/self/fd/{packet.fds[0]}'))"
        result = subprocess.run([sys.executable, "-c", script], close_fds=False, capture_output=True, text=True)
        packet.close()
    assert result.stdout.strip() == "False", result.stderr


def listener(path: Path, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path))
    sock.listen(backlog)
    return sock


def test_connect(runtime_dir: Path) -> None:
    with listener(runtime_dir / "s", 5) as server, no_leak():
        sock = connect(runtime_dir / "s", time.monotonic() + 1)
        accepted, _ = server.accept()
        send_packet(sock, b"hello")
        assert receive_packet(accepted).data == b"hello"
        assert transport.peer_credentials(sock) == (os.getpid(), os.getuid(), os.getgid())
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16)
        assert fcntl.fcntl(sock.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        sock.close()
        accepted.close()


def test_a_full_backlog_ends_at_the_deadline(runtime_dir: Path) -> None:
    with listener(runtime_dir / "s", 0):
        waiting = [connect(runtime_dir / "s", time.monotonic() + 1)]
        with no_leak():
            started = time.monotonic()
            with pytest.raises(AgentUnavailable, match="accepts no connection in time"):
                connect(runtime_dir / "s", started + 0.5)
            assert 0.4 < time.monotonic() - started < 2
        for sock in waiting:
            sock.close()


def test_a_full_backlog_that_drains_is_waited_for(runtime_dir: Path) -> None:
    with listener(runtime_dir / "s", 0) as server:
        first = connect(runtime_dir / "s", time.monotonic() + 1)
        timer = threading.Timer(0.3, lambda: server.accept()[0].close())
        timer.start()
        second = connect(runtime_dir / "s", time.monotonic() + 5)
        timer.join()
        first.close()
        second.close()


@pytest.mark.parametrize("left", [-1.0, 0.0, 1e-9])
def test_a_deadline_that_passed(runtime_dir: Path, left: float) -> None:
    """A time-out of zero would mean for ever to the kernel."""
    with listener(runtime_dir / "s", 0):
        full = connect(runtime_dir / "s", time.monotonic() + 1)
        started = time.monotonic()
        with no_leak(), pytest.raises(AgentUnavailable):
            connect(runtime_dir / "s", time.monotonic() + left)
        assert time.monotonic() - started < 1
        full.close()


def test_no_descriptor_is_left(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(AgentUnavailable, match=r"cannot connect to .*/s \(Too many open files\)"):
        connect(runtime_dir / "s", time.monotonic() + 1)


@pytest.mark.parametrize("kind", ["absent", "file", "dead", "stream", "long"])
def test_no_agent(runtime_dir: Path, kind: str) -> None:
    path = runtime_dir / ("x" * 200 if kind == "long" else "s")
    if kind == "file":
        path.touch()
    if kind == "dead":
        listener(path, 1).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, no_leak():
        if kind == "stream":
            stream.bind(str(path))
            stream.listen()
        with pytest.raises(AgentUnavailable, match="no agent listens at"):
            connect(path, time.monotonic() + 1)


def test_asyncio_waits_for_packets_and_for_room() -> None:
    async def run() -> None:
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sender, receiver = AsyncChannel(a), AsyncChannel(b)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await receiver.receive()

        async def send_many() -> None:
            for number in range(500):
                await sender.send(bytes([number % 250 + 1]) * 20_000)

        task = asyncio.create_task(send_many())
        await asyncio.sleep(0.05)
        assert not task.done(), "the queue is full"
        for number in range(500):
            assert (await receiver.receive()).data[:1] == bytes([number % 250 + 1])
        await task
        with files(3) as fds:
            await sender.send(b"x", fds)
            packet = await receiver.receive(3)
            assert len(packet.fds) == 3
            packet.close()
        sender.close()
        assert (await receiver.receive()).data == b""
        receiver.close()

    with no_leak():
        asyncio.run(run())


def test_make_room_enlarges_the_descriptor_table_and_keeps_nothing() -> None:
    before = open_fds()

    def slots() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("FDSize"))
        return int(line.split()[1])

    transport.make_room(253)
    assert slots() > 253
    assert open_fds() == before
    transport.make_room(1 << 30)  # more than the limit allows: nothing happens
    assert open_fds() == before
