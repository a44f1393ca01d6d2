"""A lease lasts as long as the engine, whatever happens to the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.test_loader import fingerprint
from tests.unit.engine.fakes import FakeAgent, Peer, agent, answering, directive, offering
from weightcache import client
from weightcache.engine import lease as leasing
from weightcache.engine.ask import Offer, ask
from weightcache.engine.lease import Lease
from weightcache.errors import Degraded
from weightcache.memory.host import HostMemory
from weightcache.paths import RankPaths
from weightcache.protocol import Accepted, Message, Renew, Renewed, failure


@pytest.fixture
def paths(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RankPaths:
    monkeypatch.setattr(leasing, "FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(leasing, "LAST_RETRY_SECONDS", 0.05)
    return RankPaths(runtime_dir, 0)


@pytest.fixture
def attached(paths: RankPaths) -> Iterator[tuple[Lease, FakeAgent]]:
    with agent(paths.public, offering()) as fake:
        offer = ask(paths.public, directive(paths), fingerprint(), HostMemory(), lambda progress: None)
        assert isinstance(offer, Offer)
        lease = Lease(paths.public, offer.set_id, offer.role, offer.conversation)
        yield lease, fake
        lease._stop.set()
        fake.close()
        lease._conversation.close()
        lease._thread.join(5)
        assert not lease._thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_stays_while_the_agent_lives(attached: tuple[Lease, FakeAgent]) -> None:
    lease, fake = attached
    time.sleep(0.2)
    assert lease._thread.is_alive()
    assert lease._thread.daemon
    assert len(fake.seen) == 1


def test_it_is_renewed_on_the_status_socket_when_the_agent_is_back(
    attached: tuple[Lease, FakeAgent], paths: RankPaths
) -> None:
    lease, fake = attached
    fake.close()
    time.sleep(0.2)
    with (
        agent(paths.public, offering()) as public,
        agent(paths.status, answering(Renewed("new", True))) as status,
    ):
        status.wait(1)
        assert status.seen == [Renew("a-set", "target")]
        time.sleep(0.2)
        assert len(status.seen) == 1, "one renewal is enough"
        assert public.seen == []
        assert public.peers == [], "renewing must never start an agent"
    with agent(paths.status, answering(Renewed("third", False))) as status:
        status.wait(1)
        assert status.seen == [Renew("a-set", "target")]
        lease._stop.set()


@pytest.mark.parametrize("answer", [failure(Degraded("bad")), Accepted(), None])
def test_it_goes_on_trying(attached: tuple[Lease, FakeAgent], paths: RankPaths, answer: Message | None) -> None:
    def refuse(peer: Peer, message: Message) -> None:
        if answer is None:
            peer.close()
        else:
            peer.send(answer)

    lease, fake = attached
    fake.close()
    with agent(paths.status, refuse) as status:
        status.wait(3)
        lease._stop.set()


def test_an_impostor_gets_no_renewal(
    attached: tuple[Lease, FakeAgent], paths: RankPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, fake = attached
    monkeypatch.setattr(client, "trusted_uids", lambda: frozenset({4_000_000}))
    fake.close()
    with agent(paths.status, answering(Renewed("new", True))) as status:
        until(lambda: len(status.peers) >= 2)
        assert status.seen == []
        lease._stop.set()


def test_retries_slow_down(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Stop:
        def is_set(self) -> bool:
            return len(waits) >= 7

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return self.is_set()

    monkeypatch.setattr(leasing, "FIRST_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(leasing, "LAST_RETRY_SECONDS", 5.0)
    lease = object.__new__(Lease)
    lease.status_path, lease.set_id, lease.role = paths.status, "s", "target"
    lease._stop = Stop()  # type: ignore[assignment]
    lease._renew()
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_thread_never_keeps_a_process() -> None:
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("weightcache-lease"))
