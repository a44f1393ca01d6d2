"""A main process and its ranks that take a launcher's orders. $FAKE_SLOT is a folder: processes write down there what
they own, and look there for what they are to do wrong.

``owns-KIND-SLOT-PID-N`` holds two times of CLOCK_MONOTONIC: since when this process owns KIND, and when it still did.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from weightcache import transport
from weightcache.engine import directive
from weightcache.standby import fence
from weightcache.standby.locks import ByteLock
from weightcache.standby.messages import (
    Accept,
    Beat,
    Done,
    Elect,
    Joined,
    Own,
    Ready,
    Release,
    Retire,
    Yield,
    decode_order,
    encode,
)

HERE = Path(os.environ["FAKE_SLOT"])
TOLD = directive.read()
SLOT = Path(TOLD.slot.private).stem[-1]
RANKS = 2


class Owning:
    """Writes down that something is owned, every millisecond."""

    count = 0

    def __init__(self, kind):
        Owning.count += 1
        self.path = HERE / f"owns-{kind}-{SLOT}-{os.getpid()}-{Owning.count}"
        began = time.monotonic()
        self.path.write_bytes(struct.pack("dd", began, began))
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), 16) as page:
            while not self.done.wait(0.001):
                struct.pack_into("d", page, 8, time.monotonic())

    def end(self):
        self.done.set()
        self.thread.join()


class Process:
    """One end of the channel."""

    def __init__(self, rank, byte):
        (HERE / f"pid-{SLOT}-{'main' if rank < 0 else 'rank'}-{os.getpid()}").touch()
        self.sock = transport.connect(TOLD.slot.channel, time.monotonic() + 10)
        self.lock = ByteLock(Path(TOLD.slot.lock), byte)
        self.owning = None
        self.send(Joined(rank))

    def send(self, message):
        with contextlib.suppress(OSError):
            transport.send_packet(self.sock, encode(message))

    def serve(self):
        while True:
            try:
                packet = transport.receive_packet(self.sock, max_fds=1)
            except ConnectionError:  # the launcher ended with something unread
                self.orphaned()
            if not packet.data:
                self.orphaned()
            order = decode_order(packet.data)
            work = threading.Thread(target=self.carry_out, args=(order, packet.fds), daemon=True)
            work.start()

    def orphaned(self):
        os._exit(1)

    def beat(self):
        while True:
            if not (HERE / f"hang-{SLOT}-{type(self).__name__}").exists():
                self.send(Beat())
            time.sleep(0.05)

    def carry_out(self, order, fds):
        for wrong in HERE.glob(f"wrong-{SLOT}-{type(order).__name__}"):
            if wrong.read_text() == "silent":
                return
            if wrong.read_text() == "late":
                wrong.with_name(f"late-{SLOT}").touch()
                while wrong.exists():
                    time.sleep(0.01)
                break
            self.send(Done(order.order, wrong.read_text()))
            return
        self.send(Done(order.order, seconds=self.do(order, fds) or {}))


class Rank(Process):
    def do(self, order, _):
        if isinstance(order, Own):
            began = time.monotonic()
            self.lock.take()
            locked = time.monotonic()
            assert fence.wait(order.fence, 60) == ()
            fenced = time.monotonic()
            self.owning = Owning(f"memory{self.lock.byte}")
            return {"lock": locked - began, "fence": fenced - locked, "map": time.monotonic() - fenced}
        assert isinstance(order, Release)
        self.owning.end()
        self.lock.give_back()
        return {}

    def orphaned(self):
        if not (HERE / f"linger-{SLOT}").exists():
            os._exit(1)
        self.lock.close()  # only the fence is left
        (HERE / f"lingers-{os.getpid()}").touch()
        while True:
            time.sleep(1)


class Main(Process):
    def do(self, order, fds):
        if isinstance(order, Elect):
            self.lock.take()
        elif isinstance(order, Accept):
            self.owning = Owning("http")
            self.listener = socket.socket(fileno=fds[0])
            self.stop, self.running = threading.Event(), []
            self.thread = threading.Thread(target=self.accept, daemon=True)
            self.thread.start()
        elif isinstance(order, Retire):
            self.stop.set()
            self.thread.join()
            self.listener.close()
            for request in self.running:
                request.join()
        else:
            assert isinstance(order, Yield)
            if self.owning is not None:
                self.owning.end()
            self.lock.give_back()

    def accept(self):
        self.listener.setblocking(False)
        while not self.stop.is_set():
            try:
                client, _ = self.listener.accept()
            except BlockingIOError:
                self.stop.wait(0.002)
                continue
            request = threading.Thread(target=self.answer, args=(client,), daemon=True)
            self.running = [one for one in self.running if one.is_alive()] + [request]
            request.start()

    def answer(self, client):
        client.setblocking(True)
        with client, contextlib.suppress(OSError):
            path = client.recv(4096).split(b" ")[1].decode()
            time.sleep(float(path[1:] or 0))
            body = f"{SLOT} {os.getpid()}"
            client.sendall(f"HTTP/1.0 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def rank_main(rank):
    if not (HERE / f"linger-{SLOT}").exists():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    process = Rank(rank, 1 + rank)
    directive.send_report(TOLD, directive.PluginReady(os.getpid(), "scheduler", "0.0.0"))
    directive.send_report(TOLD, directive.Decision(rank, "target", "disk", message="a fake"))
    process.send(Ready())
    threading.Thread(target=process.beat, daemon=True).start()
    process.serve()


def main():
    directive.send_report(TOLD, directive.PluginReady(os.getpid(), "main", "0.0.0"))
    if (HERE / f"dies-{SLOT}").exists():
        sys.exit(3)
    for rank in range(RANKS):
        subprocess.Popen([sys.executable, "-m", "sglang.launch_server", "--fake-rank", str(rank)])
    process = Main(-1, 0)
    (HERE / f"environment-{SLOT}").write_text("\n".join(f"{name}={value}" for name, value in os.environ.items()))
    process.send(Ready())
    threading.Thread(target=process.beat, daemon=True).start()
    process.serve()


if sys.argv[1:2] == ["--fake-rank"]:
    rank_main(int(sys.argv[2]))
else:
    main()
