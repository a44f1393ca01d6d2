"""One rank's subscription: to agents that serve, go away, come back, hang, refuse, and lie."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor import made
from tests.unit.monitor.made import Watched, eventually
from tests.unit.server.kept import Kept
from weightcache import protocol, records, transport
from weightcache.monitor import feed as feeds, view
from weightcache.monitor.feed import Feed
from weightcache.monitor.view import RankView
from weightcache.protocol import Done, Observed, RankStatus, Watch

Open = Callable[..., Feed]


@pytest.fixture
def opened(runtime_dir: Path) -> Iterator[Open]:
    """Subscribe to rank 0 of ``runtime_dir``; ``changes`` of the feed counts the calls."""
    made_here: list[Feed] = []

    def start(seconds: float = 0.1, changed: Callable[[], None] = lambda: None) -> Feed:
        made_here.append(Feed(made.site(runtime_dir), 0, seconds, changed))
        return made_here[-1]

    yield start
    for feed in made_here:
        feed.close()
        feed.join(6)


def known(feed: Feed) -> RankView:
    found, _ = feed.now()
    assert found is not None
    return found


def serials(feed: Feed) -> list[int]:
    return [event.happened.serial for event in feed.now()[1]]


def until(feed: Feed, agent: str, seconds: float = 10.0) -> RankView:
    eventually(lambda: feed.now()[0] and known(feed).agent == agent, seconds)
    return known(feed)


def test_each_change_is_heard(runtime_dir: Path, opened: Open) -> None:
    changes = threading.Semaphore(0)
    with Watched(runtime_dir) as agent:
        agent.events = (made.happening(3), made.happening(4))
        feed = opened(0.25, changes.release)
        assert feed.answered.wait(5)
        found = known(feed)
        assert (found.agent, found.reason, found.status) == ("up", None, agent.status)
        assert abs(found.heard_at - time.time()) < 5
        assert serials(feed) == [3, 4]
        assert agent.asked == [Watch(0.25)]
        agent.say(made.status(state="loading"), made.happening(5))
        eventually(lambda: known(feed).status.state == "loading")
        assert serials(feed) == [3, 4, 5]
        assert changes.acquire(timeout=1)
        assert changes.acquire(timeout=1)
        assert not changes.acquire(timeout=0.05)


def test_no_agent_is_a_state(opened: Open) -> None:
    feed = opened()
    assert feed.answered.wait(5)
    found = known(feed)
    assert (found.agent, found.status.state, found.heard_at) == ("down", "unknown", 0.0)
    assert found.reason
    assert found.reason.code == "no-agent"


def test_an_agent_that_goes_and_comes_again(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir) as agent:
        agent.events = (made.happening(1),)
        feed = opened()
        until(feed, "up")
        heard = known(feed).heard_at
    found = until(feed, "down")
    assert (found.status.state, found.heard_at) == ("ready", heard)  # what it said last, and when
    assert serials(feed) == [1]
    with Watched(runtime_dir) as agent:
        agent.events = (made.happening(1), made.happening(1, at=2e9), made.happening(2, at=2e9))
        found = until(feed, "up")
        assert found.heard_at > heard
        assert serials(feed) == [1, 1, 2]  # the first one was known


def test_the_status_file_may_know_more(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir):
        feed = opened()
        until(feed, "up")
        stopped = runtime_dir / "0.json"
        stopped.write_text(json.dumps(records.to_plain(made.status(state="stopped"))))
        os.utime(stopped, (time.time() + 1, time.time() + 1))
    assert until(feed, "down").status.state == "stopped"


@pytest.mark.parametrize(
    ("left", "state"),
    [
        (made.status(state="stopped", uptime_seconds=0.0), "stopped"),  # its last word
        (made.status(state="drained", uptime_seconds=5.5), "drained"),
        (made.status(state="drained", uptime_seconds=4.5), "ready"),
        (made.status(state="stopped", pid=2), "ready"),  # of another agent, and the clock is all there is
    ],
)
def test_a_clock_that_is_set_back(runtime_dir: Path, opened: Open, left: RankStatus, state: str) -> None:
    with Watched(runtime_dir):
        feed = opened()
        until(feed, "up")
        file = runtime_dir / "0.json"
        file.write_text(json.dumps(records.to_plain(left)))
        os.utime(file, (time.time() - 3600, time.time() - 3600))
    assert until(feed, "down").status.state == state
    time.sleep(2 * feeds.FIRST_RETRY_SECONDS)
    assert known(feed).status.state == state


def test_a_file_that_makes_no_sense(runtime_dir: Path, opened: Open) -> None:
    plain = records.to_plain(made.status(state="stopped")) | {"uptime_seconds": 10**400}
    (runtime_dir / "0.json").write_text(json.dumps(plain))
    assert until(opened(), "down").status.state == "unknown"


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("broken"), MemoryError()])
def test_it_survives_what_it_meets(
    runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tries: list[float] = []

    def fail(*_: object) -> None:
        tries.append(time.monotonic())
        raise error

    with Watched(runtime_dir) as agent:
        feed = opened()
        until(feed, "up")
        with monkeypatch.context() as patched:
            patched.setattr(feeds, "Conversation", fail)
            agent.script = lambda *_: None
            feed.pace(0.2)
            found = until(feed, "down")
            assert found.reason
            assert found.reason.code == "no-agent"
            assert type(error).__name__ in found.reason.message
            assert found.status.state == "ready"
            time.sleep(0.5)
            assert len(tries) <= 3
        agent.script = None
        until(feed, "up")


def test_too_many_open_files(runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with Watched(runtime_dir):
        feed = opened()
        until(feed, "up")
        create = socket.socket.__init__

        def fail(self: socket.socket, *args: Any, **options: Any) -> None:
            if "fileno" not in options:  # a new one, not an accepted one
                raise OSError(errno.EMFILE, "Too many open files")
            create(self, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "__init__", fail)
            feed.pace(0.2)
            found = until(feed, "down")
        assert found.reason
        assert "Too many open files" in found.reason.message
        until(feed, "up")


def test_another_pace_is_another_subscription(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir) as agent:
        feed = opened(5.0)
        until(feed, "up")
        feed.pace(0.5)
        eventually(lambda: len(agent.asked) == 2, 2)
        assert agent.asked == [Watch(5.0), Watch(0.5)]
        assert known(feed).agent == "up"


def test_an_end_is_at_once(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir):
        feed = opened(60.0)
        until(feed, "up")
        before = known(feed)
        started = time.monotonic()
        feed.close()
        feed.join(2)
        assert time.monotonic() - started < 0.5
        assert known(feed) is before


def test_silence(runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes stale first, then counts as down; when it speaks again, it is up."""
    monkeypatch.setattr(feeds, "PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.5)
    with Watched(runtime_dir) as agent:
        feed = opened(0.1)
        until(feed, "up")
        agent.script = lambda _agent, _connection: None
        time.sleep(0.3)
        stale = known(feed)
        assert stale.agent == "up"
        assert time.time() - stale.heard_at > 0.2
        found = until(feed, "down")
        assert found.reason
        assert "stopped answering" in found.reason.message
        assert found.heard_at == stale.heard_at
        agent.script = None
        until(feed, "up")


def test_a_failure_is_a_closed_agent(runtime_dir: Path, opened: Open) -> None:
    refuse = protocol.Failure("permission", "uid 1000 may not watch")
    with Watched(runtime_dir, script=lambda agent, connection: agent.send(connection, refuse)):
        found = until(opened(), "closed")
        assert found.reason == protocol.ErrorInfo("permission", "uid 1000 may not watch")
        assert found.status.state == "unknown"


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (b'{"protocol": 2, "type": "observed", "fds": 0}', "version-skew"),
        (b"garbage", "protocol"),
        (b'{"protocol": 1, "type": "observed", "fds": 0}', "protocol"),
        (b"[" * 50_000, "protocol"),
        (b"x" * (transport.MAX_PACKET + 1), "protocol"),
        (protocol.encode(Done("what?")), "protocol"),
    ],
)
def test_what_is_no_answer(runtime_dir: Path, opened: Open, packet: bytes, code: str) -> None:
    with Watched(runtime_dir, script=lambda _, connection: connection.sendall(packet)) as agent:
        found = until(opened(), "closed")
        assert found.reason
        assert found.reason.code == code
        time.sleep(0.5)
        assert agent.connections <= 4  # it is not asked again and again without a pause


def test_a_socket_that_refuses_this_user(runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.client.trusted_uids", lambda: frozenset({12345}))
    with Watched(runtime_dir):
        found = until(opened(), "closed")
        assert found.reason
        assert found.reason.code == "permission"


def test_a_flood_is_read_slowly(runtime_dir: Path, opened: Open) -> None:
    def flood(agent: Watched, connection: socket.socket) -> None:
        for serial in range(1, 10_000):
            agent.send(connection, Observed(agent.status, (made.happening(serial),)))

    heard: list[float] = []
    with Watched(runtime_dir, script=flood):
        feed = opened(0.1, lambda: heard.append(time.monotonic()))
        time.sleep(1.0)
        assert 2 <= len(heard) <= 15
        feed.close()
        feed.join(2)


def test_few_events_are_kept(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir) as agent:
        agent.events = tuple(made.happening(serial) for serial in range(1, 50))
        feed = opened()
        until(feed, "up")
        for start in range(50, 350, 100):
            agent.say(None, *(made.happening(serial) for serial in range(start, start + 100)))
        eventually(lambda: serials(feed)[-1:] == [349])
        assert serials(feed) == list(range(150, 350))


def test_a_socket_nobody_accepts_on(runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(runtime_dir / "0.status.sock"))
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)).connect(listener.getsockname())
        feed = opened()
        assert until(feed, "down", 3).reason


def test_a_real_agent_that_is_killed_and_restarted(kept: Kept, runtime_dir: Path) -> None:
    kept.configure()
    kept.start()
    feed = Feed(made.site(kept.paths.directory), 0, 0.1, lambda: None)
    try:
        until(feed, "up")
        kept.load()
        eventually(lambda: known(feed).status.state == "ready")
        victim = known(feed).status.pid
        seen: list[str] = []
        with kept.attach() as held:
            eventually(lambda: known(feed).status.sets[0].leases)
            assert known(feed).status.sets[0].leases[0].lease == held.message.lease
            kept.kill()
            eventually(lambda: seen.append(known(feed).agent) or known(feed).status.pid not in (victim, 0))
        eventually(lambda: known(feed).agent == "up" and known(feed).status.state == "ready")
        assert known(feed).status.sets
        names = [event.happened.event for event in feed.now()[1]]
        assert names.index("set-published") < names.index("set-adopted")
        assert len({(e.happened.at, e.happened.serial) for e in feed.now()[1]}) == len(names)
    finally:
        feed.close()
        feed.join(6)


def test_a_real_agent_that_is_stopped(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(view, "ANSWER_SECONDS", 0.5)
    kept.configure()
    kept.start()
    feed = Feed(made.site(kept.paths.directory), 0, 0.1, lambda: None)
    pid = kept.pid
    try:
        until(feed, "up")
        os.kill(pid, signal.SIGSTOP)
        found = until(feed, "down")
        assert found.reason
        assert "stopped answering" in found.reason.message
        os.kill(pid, signal.SIGCONT)
        until(feed, "up")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        feed.close()
        feed.join(6)
