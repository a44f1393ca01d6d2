"""A command for the keeper: it does what its clients ask, one JSON request a connection. Standard library only."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

FIRST_FD = 3
HANGUPS: list[int] = []
KEPT: list[socket.socket] = []


def notify(text: str, fds: list[int] | tuple[int, ...] = ()) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(os.environ["NOTIFY_SOCKET"])
        sock.sendmsg([text.encode()], ancillary)


def hung_up(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(seconds * 1000))


def barrier(text: str = "BARRIER=1") -> bool:
    """Whether the keeper answered all that was sent before."""
    reading, writing = os.pipe()
    notify(text, [writing])
    os.close(writing)
    try:
        return hung_up(reading, 5)
    finally:
        os.close(reading)


def memfd(content: str) -> int:
    fd = os.memfd_create("arena")
    os.write(fd, content.encode())
    return fd


def content(fd: int) -> str:
    link = str(Path(f"/proc/self/fd/{fd}").readlink())
    return os.pread(fd, 1000, 0).decode() if link.startswith("/memfd:") else link.partition(":")[0]


def store(name: str, contents: list[str], each: bool = True, more: str = "FDPOLL=0") -> bool:
    """Store memfds, in one message each or all in one."""
    fds = [memfd(one) for one in contents]
    for group in [[fd] for fd in fds] if each else [fds]:
        notify(f"FDSTORE=1\nFDNAME={name}\n{more}", group)
    for fd in fds:
        os.close(fd)
    return barrier()


def many(count: int, width: int) -> bool:
    """Store memfds under names of this width, in one message each."""
    for number in range(count):
        fd = memfd(str(number))
        notify(f"FDSTORE=1\nFDNAME={number:0{width}}\nFDPOLL=0", [fd])
        os.close(fd)
    return barrier()


def again(name: str, other: str) -> bool:
    """Store one open file twice under one name, and once under another."""
    fd = memfd(name)
    for wanted in (name, name, other):
        notify(f"FDSTORE=1\nFDNAME={wanted}", [fd])
    return barrier()


def copies(count: int) -> bool:
    """Store one open file in one message, under as many numbers."""
    notify("FDSTORE=1\nFDNAME=copies", [memfd("copies")] * count)
    return barrier()


def canary(name: str) -> bool:
    """Whether the keeper keeps a pipe that is stored now."""
    reading, writing = os.pipe()
    notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [writing])
    os.close(writing)
    return barrier() and not hung_up(reading, 0)


def pipe(name: str, more: str) -> bool:
    """Store a pipe's writing end, of which this process has a copy, and close the reading end then."""
    reading, writing = os.pipe()
    notify(f"FDSTORE=1\nFDNAME={name}\n{more}", [writing])
    answered = barrier()
    os.close(reading)
    return answered and barrier()


def slow(name: str, seconds: int) -> bool:
    """Store a descriptor whose last close(2) takes this long: of a connection with data that nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        KEPT.append(server.accept()[0])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    sock.setblocking(False)
    try:
        while sock.send(bytes(65536)):
            pass
    except BlockingIOError:
        notify(f"FDSTORE=1\nFDNAME={name}", [sock.fileno()])
    answered = barrier()
    sock.close()
    return answered


def tell(text: str, contents: list[str], wait: bool = True) -> bool:
    """Send one message, with memfds."""
    notify(text, [memfd(one) for one in contents])
    return wait and barrier()


def leftover() -> int:
    """A child that stays when this process is killed."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    return pid


def orphan() -> list[int]:
    """A grandchild in a session of its own that outlives its parent for a moment: its number, and its new parent."""
    keeper = os.getppid()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        if os.fork():
            os._exit(0)
        while os.getppid() != keeper:
            time.sleep(0.01)
        os.write(writing, f"{os.getpid()} {os.getppid()}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return [int(word) for word in os.read(reading, 100).split()]


def ignore() -> bool:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return True


def count() -> int:
    """How many descriptors came, as far as all of them can be read."""
    return len([content(fd) for fd in range(FIRST_FD, FIRST_FD + int(os.environ["LISTEN_FDS"]))])


def state() -> dict[str, Any]:
    pairs = Path("/proc/self/environ").read_bytes().decode().rstrip("\0").split("\0")
    environment = dict(pair.split("=", 1) for pair in pairs)
    names = environment["LISTEN_FDNAMES"].split(":")
    contents: dict[str, list[str]] = {}
    for fd, name in enumerate(names[1:], FIRST_FD + 1):
        contents.setdefault(name, []).append(content(fd))
    lines = Path("/proc/self/status").read_text().splitlines()
    masks = {line[:6]: int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))}
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "environment": environment,
        "names": names,
        "contents": contents,
        "inherited": INHERITED,
        "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "hangups": len(HANGUPS),
        **masks,
    }


VERBS = (
    store,
    many,
    again,
    copies,
    canary,
    pipe,
    slow,
    tell,
    barrier,
    leftover,
    orphan,
    ignore,
    count,
    state,
    os._exit,
)


def serve(listener: socket.socket) -> None:
    verbs = {verb.__name__: verb for verb in VERBS}
    while True:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(65536)
            if not request:
                continue
            verb, *arguments = json.loads(request)
            connection.send(json.dumps(verbs[verb](*arguments)).encode())


def open_fds() -> list[int]:
    """What is open, without the descriptor that reads it."""
    return sorted(int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists())


INHERITED = open_fds()

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, lambda *_: HANGUPS.append(1))
    print("a line of the command", flush=True)
    assert os.environ["LISTEN_PID"] == str(os.getpid()), os.environ
    sys.exit(serve(socket.socket(fileno=FIRST_FD)))
