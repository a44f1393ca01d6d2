"""The launcher's end of the channel: who is heard, who is not any more, and nothing that holds it up."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.support import eventually
from weightcache import transport
from weightcache.launch import channel as channels, processes
from weightcache.launch.channel import Channel, Heard
from weightcache.standby import fence
from weightcache.standby.messages import Accept, Beat, Done, Elect, Joined, Ready, Release, decode_order, encode

CHILD = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(sys.argv[2].encode())
time.sleep(60)
"""


@pytest.fixture
def channel(runtime_dir: Path) -> Iterator[Channel]:
    made = Channel(runtime_dir / "slot", 2)
    yield made
    made.close()
    assert not (runtime_dir / "slot").exists()


@pytest.fixture
def connect(runtime_dir: Path) -> Iterator[object]:
    made: list[socket.socket] = []

    def connected(*messages: object) -> socket.socket:
        made.append(transport.connect(runtime_dir / "slot", time.monotonic() + 5))
        for message in messages:
            made[-1].send(message if isinstance(message, bytes) else encode(message))
        return made[-1]

    yield connected
    for sock in made:
        sock.close()


def heard(channel: Channel, count: int = 1) -> list[Heard]:
    """Wait for so many."""
    found: list[Heard] = []
    assert eventually(lambda: found.extend(channel.take()) or len(found) >= count), found
    return found


def test_who_joined_is_known_by_the_kernels_word(channel: Channel, connect) -> None:
    connect(Joined(-1), Ready())
    connect(Joined(1))
    assert select.select([channel.fileno()], [], [], 5)[0]
    me = fence.identify(os.getpid())
    assert sorted(heard(channel, 3), key=lambda one: one.rank) == [
        Heard(-1, Joined(-1), me), Heard(-1, Ready(), me), Heard(1, Joined(1), me),
    ]  # fmt: skip
    assert not select.select([channel.fileno()], [], [], 0)[0]


def test_orders_go_to_whom_they_are_for_and_the_socket_with_them(channel: Channel, connect) -> None:
    main, rank = connect(Joined(-1)), connect(Joined(0))
    heard(channel, 2)
    with socket.create_server(("127.0.0.1", 0)) as public:
        assert channel.send(-1, Accept(1), [public.fileno()])
        assert channel.send(0, Release(2))
        packet = transport.receive_packet(main, max_fds=1)
        assert decode_order(packet.data) == Accept(1)
        with socket.socket(fileno=packet.fds[0]) as given:
            assert given.getsockname() == public.getsockname()
    assert decode_order(transport.receive_packet(rank).data) == Release(2)
    assert not channel.send(1, Release(3))


@pytest.mark.parametrize("first", [Ready(), Joined(2), Joined(-2), b"{}", b"\xff", b"[" * 90_000])
def test_who_does_not_join_first_is_not_heard(channel: Channel, connect, first) -> None:
    sock = connect(first)
    sock.settimeout(5)
    assert eventually(lambda: channel.take() == [] and _closed(sock))


def test_a_rank_has_one_process(channel: Channel, connect) -> None:
    first, second = connect(Joined(0)), None
    heard(channel)
    second = connect(Joined(0))
    assert eventually(lambda: channel.take() == [] and _closed(second))
    first.send(encode(Beat()))
    assert heard(channel)[0].answer == Beat()


@pytest.mark.parametrize("wrong", [b"nonsense", b'{"type": "Elect", "order": 1}', b'{"type": "Done"}', b"x" * 170_000])
def test_garbage_ends_a_connection(channel: Channel, connect, wrong: bytes) -> None:
    sock = connect(Joined(0))
    heard(channel)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sock.send(wrong)
    gone = heard(channel)[0]
    assert (gone.rank, gone.answer, gone.why) == (0, None, "said something that is no message")
    assert _closed(sock)
    assert not channel.send(0, Elect(1))


def test_descriptors_are_not_taken(channel: Channel, connect) -> None:
    sock = connect(Joined(0))
    heard(channel)
    before = _descriptors()
    with socket.socket() as pushed:
        transport.send_packet(sock, encode(Beat()), [pushed.fileno()])
        heard(channel)
    assert _descriptors() <= before


def test_a_flood_ends_a_connection_and_what_a_stopped_launcher_missed_does_not(
    channel: Channel, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MESSAGES_A_SECOND", 0.0)
    sock = connect(Joined(0))
    sock.setblocking(False)
    heard(channel)
    sent = 0
    while True:  # as many as the queue takes
        try:
            sock.send(encode(Beat()))
            sent += 1
        except BlockingIOError:
            break
    assert {one.answer for one in heard(channel, sent)} == {Beat()}
    said: list[Heard] = []
    for _ in range(int(channels.MOST_MESSAGES)):
        try:
            sock.send(encode(Beat()))
        except BlockingIOError:
            said += channel.take()
        except OSError:
            break
    assert eventually(lambda: said.extend(channel.take()) or said[-1].answer is None)
    assert said[-1].why == "said too much at once"


def test_the_end_of_a_process_is_heard_although_a_child_has_its_connection(channel: Channel, runtime_dir: Path) -> None:
    code = CHILD.replace("time.sleep(60)", "os.fork() or (time.sleep(5), os._exit(0)); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", code, str(runtime_dir / "slot"), encode(Joined(0)).decode()])
    try:
        assert heard(channel)[0].process == fence.identify(process.pid)
        assert eventually(lambda: processes.children(process.pid) != set())
        channel.kill()
        gone = heard(channel)[0]
        assert (gone.answer, gone.why) == (None, "has ended")
        assert process.wait(5) == -9
    finally:
        process.kill()
        process.wait()


def test_the_last_words_of_a_process_are_heard(channel: Channel, runtime_dir: Path) -> None:
    """Its end may be seen first: two of its packets wait, and each look takes one."""
    code = CHILD.replace("time.sleep(60)", "sys.stdin.read(); [sock.send(word.encode()) for word in sys.argv[3:]]")
    words = Beat(), Beat(), Done(1, "no memory is left")
    said = [encode(word).decode() for word in (Joined(0), *words)]
    process = subprocess.Popen([sys.executable, "-c", code, str(runtime_dir / "slot"), *said], stdin=subprocess.PIPE)
    try:
        assert heard(channel)[0].answer == Joined(0)
        process.communicate(timeout=10)
        last = heard(channel, 4)
        assert [one.answer for one in last] == [*words, None]
        assert last[-1].why == "has ended"
    finally:
        process.kill()
        process.wait()


def test_who_is_lost_can_be_killed_still(channel: Channel, runtime_dir: Path) -> None:
    code = CHILD.replace("time.sleep(60)", "sock.close(); time.sleep(60)")
    joined = encode(Joined(0)).decode()
    process = subprocess.Popen([sys.executable, "-c", code, str(runtime_dir / "slot"), joined])
    try:
        gone = heard(channel, 2)[1]
        assert (gone.answer, gone.why) == (None, "has closed its connection")
        assert process.poll() is None
        channel.kill()
        assert process.wait(5) == -9
    finally:
        process.kill()
        process.wait()


def test_a_process_that_reads_nothing_holds_nobody_up(channel: Channel, connect) -> None:
    connect(Joined(-1))
    heard(channel)
    began, sent = time.monotonic(), 0
    while channel.send(-1, Elect(1)):
        sent += 1
        assert sent < 100_000
    assert time.monotonic() - began < 10


def test_done_says_what_it_took(channel: Channel, connect) -> None:
    connect(Joined(0), Done(1, seconds={"map": 0.5}))
    assert heard(channel, 2)[1].answer == Done(1, "", {"map": 0.5})


def test_many_strangers_leave_room_for_ranks(channel: Channel, connect) -> None:
    for _ in range(channels.MOST_STRANGERS):
        connect()
    assert eventually(lambda: channel.take() == [])
    late = connect()
    assert eventually(lambda: channel.take() == [] and _closed(late))


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
