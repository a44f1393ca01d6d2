"""What a service manager hears of a slot's launcher, and when."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache.launch.notify import Manager


@pytest.fixture
def inbox(runtime_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(runtime_dir / "notify"))
        sock.setblocking(False)
        yield sock


def said(inbox: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(inbox.recv(4096).decode())
        except BlockingIOError:
            return found


def manager(inbox: socket.socket, **more: str) -> Manager:
    return Manager.of({"NOTIFY_SOCKET": inbox.getsockname(), **more})


def test_its_variables_are_taken_away(inbox: socket.socket) -> None:
    environment = {
        "NOTIFY_SOCKET": inbox.getsockname(), "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/",
    }  # fmt: skip
    assert Manager.of(environment).patience == 1.0
    assert environment == {"HOME": "/"}


def test_ready_is_said_once_and_a_status_when_it_is_new(inbox: socket.socket) -> None:
    one = manager(inbox)
    for _ in range(2):
        one.ready()
        one.status("standby")
    one.status("active since n\now")
    assert said(inbox) == ["READY=1", "STATUS=standby", "STATUS=active since n?ow"]


def test_the_watchdog_is_pinged_at_half_of_its_time_by_the_healthy(inbox: socket.socket) -> None:
    one = manager(inbox, WATCHDOG_USEC="20000000")
    assert one.ping(100.0, healthy=True) == 110.0
    assert one.ping(109.9, healthy=True) == 110.0
    assert one.ping(110.0, healthy=False) == 120.0
    assert said(inbox) == ["WATCHDOG=1"]
    one.bear(600)
    one.bear(None)
    assert said(inbox) == ["WATCHDOG_USEC=600000000\nWATCHDOG=1", "WATCHDOG_USEC=20000000\nWATCHDOG=1"]


@pytest.mark.parametrize("pid", ["1", "nonsense"])
def test_the_watchdog_of_another_process_is_not_ours(inbox: socket.socket, pid: str) -> None:
    one = manager(inbox, WATCHDOG_USEC="20000000", WATCHDOG_PID=pid)
    assert one.ping(100.0, healthy=True) == float("inf")
    one.bear(600)
    assert said(inbox) == []


def test_no_manager_is_none() -> None:
    one = Manager.of({})
    one.ready()
    one.status("standby")
    one.stopping()
    assert one.ping(0.0, healthy=True) == float("inf")


def test_abstract_addresses() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0wcache-test-{os.getpid()}")
        Manager.of({"NOTIFY_SOCKET": f"@wcache-test-{os.getpid()}"}).ready()
        sock.settimeout(5)
        assert sock.recv(100) == b"READY=1"


def test_a_manager_that_reads_nothing_or_is_gone_holds_nobody_up(inbox: socket.socket) -> None:
    one = manager(inbox)
    for number in range(10_000):
        one.status(f"{number}")
    inbox.close()
    one.ready()
