"""Orders over the slot channel: carried out in turn, answered once, and what ends the process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.slot import MAIN, SlotLauncher
from weightcache import transport
from weightcache.engine.slot_channel import Channel, Handler
from weightcache.errors import WeightcacheError
from weightcache.standby.messages import Accept, Elect, Joined, Own, Release, Yield

SECONDS = 10.0


class Process:
    """A process that joined, without anything of SGLang. Its channel is never closed, as in an engine."""

    def __init__(self, path: Path) -> None:
        self.done: list[str] = []
        self.gate = threading.Event()
        handlers: dict[type[Any], Handler] = {
            Elect: self.elect,
            Accept: self.accept,
            Yield: self.give_back,
            Release: self.release,
        }
        self.channel = Channel(str(path), MAIN, handlers, beside=(Elect,))

    def elect(self, order: Elect, fd: int) -> dict[str, float]:
        assert self.gate.wait(SECONDS)
        self.done.append("elect")
        return {"lock": 1.5}

    def accept(self, order: Accept, fd: int) -> dict[str, float]:
        os.close(fd)
        self.done.append("accept")
        return {}

    def give_back(self, order: Yield, fd: int) -> dict[str, float]:
        raise WeightcacheError("no")

    def release(self, order: Release, fd: int) -> dict[str, float]:
        raise RuntimeError("first line\nsecond line")


@contextmanager
def ends_threads_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who reads a channel ends its process with its launcher: inside the block it is the thread that ends."""
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr("weightcache.engine.slot_channel.end", lambda why: None)
        try:
            yield
        finally:
            for thread in set(threading.enumerate()) - before:
                if thread.name == "weightcache-slot_read":
                    thread.join(SECONDS)
                    assert not thread.is_alive()


@pytest.fixture
def launcher(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotLauncher]:
    with ends_threads_only(monkeypatch), SlotLauncher(runtime_dir / "channel") as made:
        yield made


@pytest.fixture
def process(launcher: SlotLauncher, runtime_dir: Path) -> Process:
    made = Process(runtime_dir / "channel")
    launcher.wait_joined(MAIN)
    return made


def test_it_says_who_it_is(launcher: SlotLauncher, process: Process) -> None:
    assert launcher.said[MAIN] == [Joined(MAIN)]
    assert launcher.pids[MAIN] == os.getpid()


def test_an_order_that_waits_holds_up_no_other(launcher: SlotLauncher, process: Process) -> None:
    elected = launcher.send_elect()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert launcher.accept(listener).problem == ""
    assert process.done == ["accept"]
    process.gate.set()
    done = elected(SECONDS)
    assert (done.problem, done.seconds) == ("", {"lock": 1.5})


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (lambda number: Yield(number), "no"),
        (lambda number: Release(number), "Release failed: RuntimeError: first line"),
        (lambda number: Own(number, ()), "this process takes no order Own of this kind"),
        (lambda number: Accept(number), "this process takes no order Accept of this kind"),
    ],
)
def test_what_fails_is_one_sentence(
    launcher: SlotLauncher, process: Process, order: Callable[[int], Any], problem: str
) -> None:
    assert launcher.ask(MAIN, order(7)).problem == problem


def test_a_descriptor_that_no_order_wants_is_closed(launcher: SlotLauncher, process: Process) -> None:
    reader, writer = os.pipe()
    assert "no order Yield" in launcher.ask(MAIN, Yield(7), [writer]).problem
    os.close(writer)
    assert os.read(reader, 1) == b""  # the last copy is gone
    os.close(reader)


def test_beats_never_wait(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ends_threads_only(monkeypatch), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / "channel"))
        listener.listen()
        channel = Channel(str(runtime_dir / "channel"), 0, {})
        peer, _ = listener.accept()
        with peer:
            for _ in range(5000):  # nobody reads: the socket is full long before
                channel.beat()
            peer.setblocking(False)
            assert transport.receive_packet(peer).data.startswith(b'{"type": "Joined"')
            assert transport.receive_packet(peer).data == b'{"type": "Beat"}'


CHILD = """
import sys, threading
from weightcache.engine.slot_channel import Channel
Channel(sys.argv[1], 3, {})
print("joined", flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def child(runtime_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that joins and waits."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(runtime_dir / "channel")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_ends_with_its_launcher(runtime_dir: Path, child: Callable[[], subprocess.Popen[str]]) -> None:
    with SlotLauncher(runtime_dir / "channel") as launcher:
        process = child()
        launcher.wait_joined(3)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err == "weightcache: the launcher is gone, and this process ends\n"


@pytest.mark.parametrize("full", [False, True])
def test_a_process_ends_with_its_launcher_whoever_reads_what_it_says(runtime_dir: Path, full: bool) -> None:
    reads, writes = os.pipe()
    with SlotLauncher(runtime_dir / "channel") as launcher:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(runtime_dir / "channel")], stdout=subprocess.DEVNULL, stderr=writes
        )
        try:
            launcher.wait_joined(3)
            if full:
                os.set_blocking(writes, False)
                with contextlib.suppress(BlockingIOError):
                    while os.write(writes, b"x" * 4096):
                        pass
                os.set_blocking(writes, True)
            else:
                os.close(reads)
            os.close(writes)
        except BaseException:
            process.kill()
            raise
    try:
        assert process.wait(SECONDS) == 1
    finally:
        process.kill()
        process.wait()
        if full:
            os.close(reads)


def test_a_process_ends_where_orders_are_none(runtime_dir: Path, child: Callable[[], subprocess.Popen[str]]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / "channel"))
        listener.listen()
        process = child()
        peer, _ = listener.accept()
        with peer:
            peer.send(b'{"type": "Elect", "order": "seven"}')
            _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.startswith("weightcache: the launcher sent what is no order ($.order: expected a whole number")


def test_nobody_listens(runtime_dir: Path) -> None:
    with pytest.raises(WeightcacheError, match="no launcher takes this process"):
        Channel(str(runtime_dir / "channel"), 0, {})
