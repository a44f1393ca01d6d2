"""What is told to the service manager arrives, or an error says so in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.server.manager import FakeManager, descriptors
from weightcache.errors import WeightcacheError
from weightcache.server import notify
from weightcache.server.notify import Manager

VARIABLES = ("NOTIFY_SOCKET", "FDSTORE", "WATCHDOG_USEC", "WATCHDOG_PID")


@pytest.fixture
def fake(runtime_dir: Path) -> Iterator[FakeManager]:
    with FakeManager(str(runtime_dir / "notify")) as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notify, "RETRY_SECONDS", 0.01)


class Silent:
    """No library."""

    def notify(self, text: str) -> None:
        """Nothing."""


def run(fake: FakeManager, work: Any, limit: float = 20.0) -> None:
    """Run ``work(manager)`` and close the manager's socket."""

    async def whole() -> None:
        manager = Manager(fake.address, Silent())
        try:
            async with asyncio.timeout(limit):
                await work(manager)
        finally:
            manager.close()

    before = descriptors()
    asyncio.run(whole())
    assert descriptors() == before + len(fake.stored)


@pytest.fixture(params=["path", "abstract"])
def either(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[FakeManager]:
    """A manager at a path, and one with an abstract address."""
    path = runtime_dir / "notify"
    with FakeManager(str(path) if request.param == "path" else f"@weightcache-test-{path}") as found:
        yield found


def test_everything_arrives_in_order_before_the_barrier(either: FakeManager) -> None:
    either.delay = 0.01

    async def work(manager: Manager) -> None:
        reader, writer = os.pipe()
        await manager.store("a", reader)
        await manager.store("b", writer)
        await manager.remove("a")
        await manager.ready()
        await manager.stopping()
        await manager.barrier()
        assert either.messages == [
            "FDSTORE=1\nFDNAME=a\nFDPOLL=0",
            "FDSTORE=1\nFDNAME=b\nFDPOLL=0",
            "FDSTOREREMOVE=1\nFDNAME=a",
            "READY=1",
            "STOPPING=1",
            "BARRIER=1",
        ]
        assert either.names == ["b"]
        os.close(reader)
        os.close(writer)

    run(either, work)


def test_a_full_queue_is_waited_for(fake: FakeManager) -> None:
    """Far more messages than a queue takes, from several tasks, to a manager that first reads nothing, then slowly."""
    fake.delay = 0.002
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]

    async def fill(manager: Manager, number: int) -> None:
        for _ in range(20):
            await manager.store(f"s{number}", fds[number])

    async def work(manager: Manager) -> None:
        with fake.deaf():
            tasks = [asyncio.ensure_future(fill(manager, number)) for number in range(5)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)
        await manager.barrier()
        assert len(fake.messages) == 101
        assert fake.messages[-1] == "BARRIER=1"

    run(fake, work)
    for fd in fds:
        os.close(fd)


def test_nobody_reads(fake: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SEND_SECONDS", 0.1)

    async def work(manager: Manager) -> None:
        with fake.deaf():
            with pytest.raises(WeightcacheError, match=r"the service manager read no messages for 0\.2 s"):
                await manager.barrier(0.2)
            started = time.monotonic()
            with pytest.raises(WeightcacheError, match=r"read no messages for 0\.1 s"):
                await asyncio.gather(*[manager.ready() for _ in range(30)])
            assert 0.05 < time.monotonic() - started < 5
            for work in (manager.barrier(), manager.stopping(), manager.remove("x"), manager.store("x", 0)):
                with pytest.raises(WeightcacheError, match="read no messages"):
                    await work
        await manager.barrier()  # and what comes later arrives
        assert fake.messages[-1] == "BARRIER=1"
        assert fake.messages[0] == "BARRIER=1"

    run(fake, work)


def test_a_wait_that_is_cancelled_leaves_nothing_behind(fake: FakeManager) -> None:
    async def work(manager: Manager) -> None:
        with fake.deaf():
            tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(manager.barrier())]
            tasks += [asyncio.ensure_future(manager.ready()) for _ in range(30)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await manager.barrier()

    run(fake, work)


def test_a_manager_that_comes_back(fake: FakeManager) -> None:
    """It re-executes itself: for a moment nobody is there, and the old connection leads nowhere."""

    async def work(manager: Manager) -> None:
        await manager.ready()
        await manager.barrier()
        await asyncio.to_thread(fake.hang_up)
        waiting = asyncio.ensure_future(manager.remove("x"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        fake.open()
        await waiting
        await manager.barrier()
        assert fake.messages[2:] == ["FDSTOREREMOVE=1\nFDNAME=x", "BARRIER=1"]

    run(fake, work)


def test_a_manager_that_stays_away(fake: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SEND_SECONDS", 0.2)
    fake.hang_up()

    async def work(manager: Manager) -> None:
        with pytest.raises(WeightcacheError, match=r"cannot be reached: .*No such file"):
            await manager.ready()

    run(fake, work)
    fake.open()


def test_too_many_descriptors_in_flight_are_waited_for(fake: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """ETOOMANYREFS (unix(7)) passes as soon as somebody reads."""
    refusals = [OSError(109, "Too many references: cannot splice")] * 3
    real = socket.socket.sendmsg

    def sendmsg(self: socket.socket, *arguments: Any) -> int:
        if refusals:
            raise refusals.pop()
        return real(self, *arguments)

    monkeypatch.setattr(socket.socket, "sendmsg", sendmsg)

    async def work(manager: Manager) -> None:
        await manager.ready()
        await manager.barrier()
        assert fake.messages == ["READY=1", "BARRIER=1"]

    run(fake, work)


def test_a_pipe_that_hung_up() -> None:
    reader, writer = os.pipe()
    other = os.dup(writer)
    os.close(writer)
    assert not notify.hung_up(reader)
    os.write(other, b"x")
    assert not notify.hung_up(reader)
    os.close(other)
    assert notify.hung_up(reader)
    os.close(reader)


# -- from the environment ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken(fake: FakeManager, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Manager]:
    """The manager that these variables make."""
    for name, value in {"NOTIFY_SOCKET": fake.address, **variables}.items():
        monkeypatch.setenv(name, value)
    manager = notify.manager(os.environ)
    assert manager is not None
    assert not set(os.environ) & set(VARIABLES)
    yield manager
    manager._notifier.socket.close()


def test_the_variables_are_taken(either: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"FDSTORE": "77", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    with taken(either, monkeypatch, **variables) as manager:
        assert (manager.limit, manager.watchdog) == (77, 3.0)
        assert not manager._notifier.socket.get_inheritable()
        manager.alive()
        manager.extend(2.5)
        either.await_sent("EXTEND")
        assert either.messages == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=2500000"]


@pytest.mark.parametrize(
    ("variables", "limit", "watchdog"),
    [
        ({}, None, 0.0),
        ({"WATCHDOG_USEC": "500000"}, None, 0.5),
        ({"FDSTORE": "0", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, 0, 0.0),
        ({"FDSTORE": "-1", "WATCHDOG_USEC": "x"}, None, 0.0),
    ],
)
def test_variables_that_are_absent_strange_or_for_others(
    fake: FakeManager, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], limit: int | None, watchdog: float
) -> None:
    with taken(fake, monkeypatch, **variables) as manager:
        assert (manager.limit, manager.watchdog) == (limit, watchdog)


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234"])
def test_no_manager(address: str) -> None:
    assert notify.manager({"NOTIFY_SOCKET": address} if address else {}) is None


def test_without_the_library_one_sentence(fake: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sdnotify", None)
    with pytest.raises(WeightcacheError, match="NOTIFY_SOCKET is set and the package sdnotify is missing") as caught:
        notify.manager({"NOTIFY_SOCKET": fake.address})
    assert "\n" not in caught.value.message


def test_what_may_get_lost_never_waits(fake: FakeManager, monkeypatch: pytest.MonkeyPatch) -> None:
    with taken(fake, monkeypatch) as manager:
        with fake.deaf():
            started = time.monotonic()
            for number in range(1000):
                manager.status(f"number {number}")
                manager.alive()
            assert time.monotonic() - started < 2
        fake.await_sent("STATUS=number 0")
        fake.hang_up()
        manager.status("nobody is there")
        fake.open()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=2000) | st.text("aé\n\r\0=漢🙂", min_size=900))
def test_a_status_is_one_line_of_ascii(text: str) -> None:
    class Library:
        sent: str

        def notify(self, text: str) -> None:
            self.sent = text

    library = Library()
    Manager("/nowhere", library).status(text)
    line = library.sent.removeprefix("STATUS=")
    assert line.isascii()
    assert not line or line.isprintable()
    assert len(line) == min(len(text), 1000)
    assert all(shown in (char, "?") for shown, char in zip(line, text, strict=False))
    library.sent.encode("latin-1")


def test_a_manager_that_is_gone_is_waited_for_only_once(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SEND_SECONDS", 0.3)

    async def run() -> list[float]:
        gone = notify.Manager(str(runtime_dir / "nobody"), notifier=None)
        spent = []
        for _ in range(4):
            started = time.monotonic()
            with pytest.raises(WeightcacheError, match="cannot be reached"):
                await gone.remove("x")
            spent.append(time.monotonic() - started)
        return spent

    first, *later = asyncio.run(run())
    assert first >= 0.3
    assert max(later) < 0.2
