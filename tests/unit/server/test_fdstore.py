"""A set that was kept is in the manager's store, whole; one that was refused left nothing; a loss is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.server import made
from tests.unit.server.made import commit, names
from tests.unit.server.manager import FakeManager, descriptors
from weightcache import records
from weightcache.errors import StoreRejected, WeightcacheError
from weightcache.memory import memfd
from weightcache.paths import RankPaths
from weightcache.server import adopt, fdstore, notify
from weightcache.server.app import Agent
from weightcache.server.fdstore import FdStore
from weightcache.server.notify import Manager
from weightcache.server.sets import Complete, Record
from weightcache.server.settings import Settings
from weightcache.transport import close_all

CANARY_AND_SUCCESSOR = 2


class Library:
    """What may get lost is lost."""

    def notify(self, text: str) -> None:
        """Nothing."""


class Flaky(Manager):
    """``failing`` is called with the name of every descriptor that is to be stored or removed; it may raise."""

    failing: Callable[[str], None] = staticmethod(lambda _: None)

    async def store(self, name: str, fd: int) -> None:
        self.failing(f"store {name}")
        await super().store(name, fd)

    async def remove(self, name: str) -> None:
        self.failing(f"remove {name}")
        await super().remove(name)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(fdstore, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(fdstore, "LAST_RETRY_SECONDS", 0.05)


@pytest.fixture
def fake(runtime_dir: Path) -> Iterator[FakeManager]:
    with FakeManager(str(runtime_dir / "notify")) as found:
        yield found


@contextlib.contextmanager
def deaf(fake: FakeManager) -> Iterator[None]:
    """The manager reads nothing, and nobody has the patience to wait for it."""
    with pytest.MonkeyPatch.context() as patch, fake.deaf():
        patch.setattr(notify, "SEND_SECONDS", 0.15)
        patch.setattr(Manager.barrier, "__defaults__", (0.15,))
        yield


def run(fake: FakeManager, work: Callable[[FdStore], Awaitable[None]], announced: int | None = None) -> None:
    """Run ``work(store)``, and look for descriptors that were left open."""

    async def whole() -> None:
        manager = Flaky(fake.address, Library(), announced)
        store = FdStore(manager)
        try:
            async with asyncio.timeout(20):
                await store.adopt([], [])
                await work(store)
        finally:
            await store.close()
            manager.close()

    before = descriptors() - len(fake.stored)
    asyncio.run(whole())
    assert descriptors() - len(fake.stored) == before


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - for what happens in another thread
            await asyncio.sleep(0.005)


async def resize(store: FdStore, fake: FakeManager, limit: int) -> None:
    """Change the limit between two operations.

    What is refused before the limit grows, and followed by a canary after it, goes unnoticed.
    """
    async with store._lock:
        fake.limit = limit


async def safe(store: FdStore, fake: FakeManager, *sets: Complete) -> None:
    """Wait until all is well: these sets are stored, with one canary, and nothing else."""
    await until(lambda: store.kept == "store" and fake.names == names(*sets) and len(fake.canaries) == 1)


def test_keep_and_forget(fake: FakeManager) -> None:
    async def work(store: FdStore) -> None:
        first, second = commit(2, 1), commit(3)
        await store.keep(first)
        assert fake.names == names(*first)
        await store.keep(second)
        await safe(store, fake, *first, *second)
        await store.forget(first[0].record.id)
        assert fake.names == names(first[1], *second)
        await store.forget("unknown")
        await store.forget(first[0].record.id)
        await store.forget(first[1].record.id)
        await store.forget(second[0].record.id)
        assert fake.names == []
        made.close(*first, *second)

    run(fake, work)
    assert all("\nFDPOLL=0" in text for text in fake.sent("FDSTORE=1"))
    assert all(len(name) <= 40 for name in _stored_names(fake))


def _stored_names(fake: FakeManager) -> list[str]:
    return [text.split("\n")[1].removeprefix("FDNAME=") for text in fake.sent("FDSTORE=1")]


def test_what_is_stored_is_what_the_next_agent_needs(fake: FakeManager) -> None:
    sets = commit(2, 1)

    async def work(store: FdStore) -> None:
        await store.keep(sets)
        await safe(store, fake, *sets)  # the canary of the time before may still be on its way out
        kept = dict(fake.stored)
        for complete in sets:
            record_fd = kept[f"{complete.record.id}.record"]
            assert memfd.is_sealed(record_fd)
            text = memfd.read_sealed(record_fd, adopt.MAX_RECORD)
            assert records.from_plain(Record, json.loads(text)) == complete.record
            stored = [kept[f"{complete.record.id}.{number}"] for number in range(len(complete.fds))]
            assert [os.fstat(fd).st_ino for fd in stored] == [os.fstat(fd).st_ino for fd in complete.fds]
        found = adopt.sort_out(fake.stored)
        assert {adopted.complete.record.id for adopted in found.sets} == {s.record.id for s in sets}
        assert list(found.names) == fake.canaries

    run(fake, work)
    made.close(*sets)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_limit_that_is_known_is_respected(fake: FakeManager, earlier: bool) -> None:
    old, sets = commit(1), commit(2, 1)
    needed = CANARY_AND_SUCCESSOR + 4 + 3 + 3 * earlier

    async def work(store: FdStore) -> None:
        if earlier:
            await store.keep(old)
        await safe(store, fake, *old[:earlier])
        sent = len(fake.messages)
        with pytest.raises(StoreRejected, match=rf"it keeps {needed - 1} and {needed} are needed.*FileDescriptorStore"):
            await store.keep(sets)
        assert len(fake.messages) == sent
        assert fake.names == names(*old[:earlier])
        store._manager.limit = needed
        await store.keep(sets)
        assert fake.names == names(*old[:earlier], *sets)

    run(fake, work, announced=needed - 1)
    made.close(*old, *sets)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_silent_refusal_is_noticed_wherever_it_comes(fake: FakeManager, earlier: bool) -> None:
    """The manager says nothing, whichever descriptor is the first that has no room."""
    old, sets = commit(2), commit(2, 1)
    needed = CANARY_AND_SUCCESSOR + 4 + 3 + 4 * earlier

    async def work(store: FdStore) -> None:
        if earlier:
            await store.keep(old)
        for limit in range(1 + 4 * earlier, needed):
            fake.limit = limit
            with pytest.raises(StoreRejected, match=f"{needed} are needed"):
                await store.keep(sets)
            await until(lambda: fake.names == names(*old[:earlier]))
            assert store.kept == "store"  # what was kept before still is
        fake.limit = needed
        await store.keep(sets)
        assert fake.names == names(*old[:earlier], *sets)

    run(fake, work)
    made.close(*old, *sets)


def test_an_emptied_store_is_filled_again(fake: FakeManager, caplog: pytest.LogCaptureFixture) -> None:
    sets = commit(2, 1)
    kept = []

    async def work(store: FdStore) -> None:
        await store.keep(sets)
        store.changed = lambda: kept.append(store.kept)
        for _ in range(3):
            await asyncio.to_thread(fake.empty)
            await until(lambda: "store" in kept)
            await safe(store, fake, *sets)
            assert [state for state, _ in itertools.groupby(kept)] == ["lost", "store"]
            kept.clear()

    run(fake, work)
    made.close(*sets)
    assert caplog.text.count("does not hold the descriptors") == 3


def test_a_store_that_stays_too_small(fake: FakeManager) -> None:
    """Nothing more is taken while what is there is not safe; when there is room again, all is stored."""
    old, new = commit(2), commit(1)

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for limit in (0, 3, 4):  # room for nothing, for a part, for all but a canary
            fake.limit = limit
            await asyncio.to_thread(fake.empty)
            await until(lambda: store.kept == "lost")
            for _ in range(3):
                with pytest.raises(StoreRejected):
                    await store.keep(new)
                assert store.kept == "lost"
                await asyncio.sleep(0.02)
            assert not set(fake.names) & set(names(*new))
            await resize(store, fake, 100)
            await safe(store, fake, *old)
        await store.keep(new)
        await safe(store, fake, *old, *new)

    run(fake, work)
    made.close(*old, *new)


def positions(fake: FakeManager, sets: Sequence[Complete]) -> int:
    """How many messages it takes to keep sets beside others."""
    old = commit(1)
    counted = []

    async def work(store: FdStore) -> None:
        await store.keep(old)
        await store._manager.barrier()
        before = len(fake.messages)
        await store.keep(sets)
        await store._manager.barrier()
        counted.append(len(fake.messages) - before - 1)
        for complete in (*old, *sets):
            await store.forget(complete.record.id)

    run(fake, work)
    made.close(*old)
    return counted[0]


def test_a_store_that_is_emptied_while_a_set_is_kept(fake: FakeManager) -> None:
    """At every message of it: in the end both the old and the new set are stored."""
    old, new = commit(1), commit(2, 1)
    count = positions(fake, new)
    assert count == 3 + 4 + 3  # canary, barrier, removal of the old canary; seven descriptors

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for position in range(count):
            left = itertools.count(-position)
            fake.hook = lambda _, left=left: fake.empty() if next(left) == 0 else None
            await store.keep(new)
            await until(lambda: fake.names == names(*old, *new))
            await safe(store, fake, *old, *new)
            fake.hook = lambda _: None
            for complete in new:
                await store.forget(complete.record.id)

    run(fake, work)
    made.close(*old, *new)


@pytest.mark.parametrize("limit", [3, 100])
def test_a_store_that_is_emptied_while_it_is_filled_again(fake: FakeManager, limit: int) -> None:
    """At once, or when there is room for everything at last."""
    sets = commit(2, 1)

    async def work(store: FdStore) -> None:
        await store.keep(sets)
        for position in range(14):
            left = itertools.count(-position)

            def again(_: str, left: Any = left) -> None:
                if next(left) == 0:
                    fake.empty()

            await resize(store, fake, limit)
            await asyncio.to_thread(fake.empty)
            await until(lambda: store.kept == "lost" or limit == 100)
            await asyncio.sleep(0.02 * (limit == 3))
            async with store._lock:
                fake.hook, fake.limit = again, 100
            await until(lambda: fake.names == names(*sets))
            await asyncio.sleep(0.01)
            fake.hook = lambda _: None
            await safe(store, fake, *sets)

    run(fake, work)
    made.close(*sets)


def test_a_store_that_is_emptied_and_made_smaller_while_a_set_is_kept(fake: FakeManager) -> None:
    """As a daemon-reload with a smaller limit does. What is refused leaves nothing; ``kept`` tells the truth."""
    old, new = commit(2), commit(2)
    count = positions(fake, new)

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for limit, position in itertools.product(range(9), range(count)):
            left = itertools.count(-position)

            def shrink(_: str, left: Any = left, limit: int = limit) -> None:
                if next(left) == 0:
                    fake.limit = limit
                    fake.empty()

            fake.hook = shrink
            try:
                await store.keep(new)
            except StoreRejected:
                kept = old
            else:
                kept = (*old, *new)
            # After a commit it may be noticed a moment later that the store was emptied once more.
            await asyncio.sleep(0.01)
            if store.kept == "store":
                await asyncio.sleep(0.02)
                assert store.kept == "lost" or set(names(*kept)) <= set(fake.names), (limit, position)
            fake.hook = lambda _: None
            await resize(store, fake, 100)
            await safe(store, fake, *kept)
            if kept != old:
                await store.forget(new[0].record.id)

    run(fake, work)
    made.close(*old, *new)


def test_adoption_goes_on_with_what_is_there_and_removes_the_rest(fake: FakeManager) -> None:
    first, second = commit(1, 2), commit(1)

    async def earlier(store: FdStore) -> None:
        await store.keep(first)
        await store.keep(second)
        await safe(store, fake, *first, *second)

    run(fake, earlier)
    stray = [(f"{'0' * 12}.1", os.open(os.devnull, os.O_RDONLY)), ("stored", os.open(os.devnull, os.O_RDONLY))]
    fake.stored += stray
    handed = [(name, os.dup(fd)) for name, fd in reversed(fake.stored)]
    found = adopt.sort_out(handed)
    assert set(found.names) == {"stored", f"{'0' * 12}.1", *fake.canaries}
    for fd in found.fds:
        os.close(fd)
    sets = [adopted.complete for adopted in found.sets]

    async def later(store: FdStore) -> None:
        await store.adopt(found.sets, found.names)
        await safe(store, fake, *first, *second)
        await asyncio.to_thread(fake.empty)
        await until(lambda: store.kept == "lost")
        await safe(store, fake, *first, *second)
        for complete in sets:
            await store.forget(complete.record.id)
        assert fake.names == []

    before = descriptors()
    asyncio.run(_with_store(fake, later))
    made.close(*sets)
    assert descriptors() == before - sum(len(s.fds) + 1 for s in sets) * 2 - len(stray)
    made.close(*first, *second)


async def _with_store(fake: FakeManager, work: Callable[[FdStore], Awaitable[None]]) -> None:
    manager = Manager(fake.address, Library())
    store = FdStore(manager)
    async with asyncio.timeout(20):
        await work(store)
    await store.close()
    manager.close()


def test_adoption_by_a_manager_without_room(fake: FakeManager) -> None:
    """It was emptied before the agent came: what was handed over is stored again as soon as that is possible."""
    sets = commit(1)
    fake.limit = 2

    async def work(store: FdStore) -> None:
        record = memfd.sealed("record", json.dumps(records.to_plain(sets[0].record)).encode())
        await store.adopt([(sets[0], record)], [])
        assert store.kept == "store"  # only a canary was looked for
        await asyncio.to_thread(fake.empty)
        await until(lambda: store.kept == "lost")
        await resize(store, fake, 100)
        await safe(store, fake, *sets)

    run(fake, work)
    fake.empty()
    fake.limit = 0
    run(fake, lambda store: until(lambda: store.kept == "lost"))
    made.close(*sets)


def open_inodes() -> set[int]:
    """The files that this process has open."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(fd.stat().st_ino)
    return found


def test_the_manager_lets_go_before_the_agent_does(fake: FakeManager, tmp_path: Path) -> None:
    """Only then is the agent's close the last one, which its clients wait for."""
    inodes: set[int] = set()
    open_at: dict[str, set[int]] = {}

    def look(text: str) -> None:
        open_at[text.split("\n")[0]] = open_inodes() & inodes

    async def work(store: FdStore) -> None:
        sets = commit(2)
        inodes.update(os.fstat(fd).st_ino for fd in sets[0].fds)
        agent = Agent(Settings(0, RankPaths(tmp_path, 0), tmp_path / "public"), store)
        await store.keep(sets)
        agent.adopt(sets)
        await store._manager.barrier()
        fake.hook = look
        sent = len(fake.messages)
        await agent.drop(next(iter(agent.sets)))
        assert fake.messages[sent:] == [
            *(f"FDSTOREREMOVE=1\nFDNAME={sets[0].record.id}.{part}" for part in (0, 1, 2, "record")),
            "BARRIER=1",
        ]
        assert open_at == {"FDSTOREREMOVE=1": inodes, "BARRIER=1": inodes}
        look("later")
        assert open_at["later"] == set()
        await agent.background()

    run(fake, work)


def test_a_commit_that_is_given_up_is_closed_whatever_the_manager_does(fake: FakeManager, tmp_path: Path) -> None:
    async def work(store: FdStore) -> None:
        agent = Agent(Settings(0, RankPaths(tmp_path, 0), tmp_path / "public"), store)
        for silent in (False, True):
            sets = commit(1, 1, 1)
            inodes = {os.fstat(fd).st_ino for complete in sets for fd in complete.fds}
            await store.keep(sets)
            with deaf(fake) if silent else contextlib.nullcontext():
                await agent.abandon(sets)
            await store.forget(sets[0].record.id)
            await store._manager.barrier()
            assert fake.names == []
            assert not inodes & open_inodes()

    run(fake, work)


# -- a manager that does not answer ------------------------------------------------------------------------------------


def test_a_deaf_manager_refuses_a_commit_and_keeps_nothing(fake: FakeManager) -> None:
    """What was sent before is taken back as soon as the manager listens."""
    old, new = commit(1), commit(1, 1)

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for room in (1, 5, 9):
            with deaf(fake):
                # The queue has room for a part of it.
                for _ in range(11 - room):
                    await store._manager.ready()
                with pytest.raises(WeightcacheError, match="read no messages"):
                    await store.keep(new)
                with pytest.raises(WeightcacheError, match="read no messages"):
                    await store.forget(new[0].record.id)
            await store.forget(new[0].record.id)
            await store.forget(new[1].record.id)
            assert fake.names == names(*old)
            assert len(fake.canaries) == 1
        with deaf(fake), pytest.raises(WeightcacheError, match="read no messages"):
            await store.forget(old[0].record.id)
        await store.keep(new)
        await safe(store, fake, *new)

    run(fake, work)
    made.close(*old, *new)


def test_a_manager_that_fails_at_any_step_leaves_no_canary_and_no_descriptor(fake: FakeManager) -> None:
    old, new = commit(1), commit(1)
    room = CANARY_AND_SUCCESSOR + 3 + 3

    async def work(store: FdStore) -> None:
        manager = store._manager
        assert isinstance(manager, Flaky)
        await store.keep(old)
        fake.limit = room
        for step in itertools.count():
            left = itertools.count(-step)

            def fail(_: str, left: Any = left) -> None:
                if next(left) == 0:
                    raise WeightcacheError("not now")

            manager.failing = fail
            try:
                await store.keep(new)
                break
            except WeightcacheError:
                manager.failing = lambda _: None
            # Whatever was left is no reason to refuse: there is just enough room.
            await store.keep(new)
            await safe(store, fake, *old, *new)
            await store.forget(new[0].record.id)
        assert step == 3 + 1 + 1  # three descriptors, a canary, and the removal of the one before

    run(fake, work)
    made.close(*old, *new)


def test_a_commit_that_is_cancelled_leaves_nothing(fake: FakeManager) -> None:
    """After any number of turns of the event loop."""
    old, new = commit(1), commit(1, 1)
    fake.delay = 0.0005

    async def work(store: FdStore) -> None:
        await store.keep(old)
        done = False
        for turns in itertools.count():
            task = asyncio.ensure_future(store.keep(new))
            for _ in range(turns):
                await asyncio.sleep(0.0003)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                assert task.exception() is None
            for complete in new:
                await store.forget(complete.record.id)
            await store.keep(new)
            await safe(store, fake, *old, *new)
            for complete in new:
                await store.forget(complete.record.id)
            if done:
                break

    run(fake, work)
    made.close(*old, *new)


def test_a_manager_that_executes_itself_anew(fake: FakeManager) -> None:
    """Nothing is lost with it, and a commit that waits for it succeeds."""
    old, new = commit(1), commit(2)

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for pause in (0.0, 0.001, 0.003, 0.01):
            fake.delay = 0.001
            task = asyncio.ensure_future(store.keep(new))
            await asyncio.sleep(pause)
            await asyncio.to_thread(fake.hang_up)
            fake.open()
            await task
            await safe(store, fake, *old, *new)
            await store.forget(new[0].record.id)

    run(fake, work)
    made.close(*old, *new)


# -- an agent that is killed between any two messages ------------------------------------------------------------------


@contextlib.contextmanager
def killed(fake: FakeManager, *sets: Complete) -> Iterator[list[frozenset[str]]]:
    """Collects which sets the next agent adopts if this one is killed before one of the messages meanwhile, or after
    the last; the same one after the other counts once.
    """
    moments: list[list[str]] = []
    adopted: list[frozenset[str]] = []

    def look(_: str = "") -> None:
        moments.append([name for name, _ in fake.stored])

    fake.hook = look
    yield adopted
    fake.hook = lambda _: None
    look()
    stored = made.entries(*sets)
    null = os.open(os.devnull, os.O_RDONLY)
    known = dict(stored)
    found = [made.adopted([(name, known.get(name, null)) for name in there]) for there, _ in itertools.groupby(moments)]
    adopted += [sets for sets, _ in itertools.groupby(found)]
    close_all([null, *(fd for name, fd in stored if name.endswith(".record"))])


def ids(*sets: Complete) -> frozenset[str]:
    return frozenset(complete.record.id for complete in sets)


def growing(*sets: Complete) -> list[frozenset[str]]:
    """None of the sets, one, two, ..., all."""
    return [ids(*sets[:count]) for count in range(len(sets) + 1)]


def test_killed_while_a_commit_is_kept_or_taken_back(fake: FakeManager) -> None:
    """It is there as a whole, or not at all."""
    old, new = commit(2, 1), commit(1, 3, 1)

    async def work(store: FdStore) -> None:
        await store.keep(old)
        with killed(fake, *old, *new) as adopted:
            await store.keep(new)
            await store._manager.barrier()
        assert adopted == [ids(*old), ids(*old, *new)]
        with killed(fake, *old, *new) as adopted:
            await store.take_back(new)
        assert adopted == [ids(*old, *new), ids(*old)]
        assert fake.names == names(*old)

    run(fake, work)
    made.close(*old, *new)


def test_killed_while_a_commit_is_refused(fake: FakeManager) -> None:
    """By a manager that has no room, in silence; by one that fails; or it is cancelled."""
    old, new = commit(1, 1), commit(2, 1)
    possible = [ids(*old)], [ids(*old), ids(*old, *new), ids(*old)]
    seen = []

    async def refused(store: FdStore, expected: type[BaseException]) -> None:
        with killed(fake, *old, *new) as adopted:
            with pytest.raises(expected):
                await store.keep(new)
            await store.forget("whatever was left to be removed")
            await store._manager.barrier()
        assert adopted in possible
        assert fake.names == names(*old)
        seen.append(adopted)

    async def work(store: FdStore) -> None:
        manager = store._manager
        assert isinstance(manager, Flaky)
        await store.keep(old)
        await store._manager.barrier()
        needed = len(names(*old, *new))
        for limit in range(len(names(*old)) + 1, needed + CANARY_AND_SUCCESSOR):
            fake.limit = limit
            await refused(store, StoreRejected)
        fake.limit = 100
        for error, step in itertools.product((WeightcacheError("not now"), asyncio.CancelledError()), range(8)):
            left = itertools.count(-step)

            def fail(_: str, left: Any = left, error: BaseException = error) -> None:
                if next(left) == 0:
                    raise error

            manager.failing = fail
            await refused(store, type(error))

    run(fake, work)
    assert all(adopted in seen for adopted in possible)
    made.close(*old, *new)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_killed_while_sets_of_a_commit_are_evicted(fake: FakeManager, first: int) -> None:
    """One after the other; each time the rest stays."""
    sets, other = commit(1, 2, 1), commit(1)
    order = [*sets[first:], *sets[:first]]

    async def work(store: FdStore) -> None:
        await store.keep(sets)
        await store.keep(other)
        with killed(fake, *sets, *other) as adopted:
            for complete in order:
                await store.forget(complete.record.id)
        assert adopted == [ids(*order[count:], *other) for count in range(len(order) + 1)]

    run(fake, work)
    made.close(*sets, *other)


@pytest.mark.parametrize("evicted", [None, 0, 1, 2])
def test_killed_while_an_emptied_store_is_filled_again(fake: FakeManager, evicted: int | None) -> None:
    """What is there again is adopted, whatever is still missing of its companions."""
    sets, other = commit(1, 2, 1), commit(1)
    left = [complete for number, complete in enumerate((*sets, *other)) if number != evicted]

    async def work(store: FdStore) -> None:
        await store.keep(sets)
        await store.keep(other)
        if evicted is not None:
            await store.forget(sets[evicted].record.id)
        await safe(store, fake, *left)
        async with store._lock:
            await asyncio.to_thread(fake.empty)
            await until(lambda: store.kept == "lost")
        with killed(fake, *sets, *other) as adopted:
            await safe(store, fake, *left)
        assert adopted == growing(*left)

    run(fake, work)
    made.close(*sets, *other)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_killed_while_what_is_missing_is_stored_again(fake: FakeManager, data: st.DataObject) -> None:
    """Whatever the manager dropped: storing it again takes nothing away from the next agent, and in the end all is
    there.
    """
    sets = (*commit(1, 2), *commit(1, 1))
    dropped = data.draw(st.lists(st.sampled_from(names(*sets)), unique=True))

    async def work(store: FdStore) -> None:
        await store.keep(sets[:2])
        await store.keep(sets[2:])
        for complete in sets:
            for name in set(names(complete)) & set(dropped):
                await store._manager.remove(name)
        await store._manager.barrier()
        with killed(fake, *sets) as adopted:
            async with store._lock:
                assert await store._store_all()
            await store._manager.barrier()
        assert all(before < after for before, after in itertools.pairwise(adopted))
        assert adopted[-1] == ids(*sets)
        for complete in sets:
            await store.forget(complete.record.id)

    try:
        run(fake, work)
    finally:
        made.close(*sets)


def test_killed_after_the_store_was_emptied_while_a_commit_is_kept(fake: FakeManager) -> None:
    """Until that is noticed, a part of the commit may look whole. From then on: first the old ones, then all of it."""
    old, new = commit(1, 2), commit(2, 1)
    count = positions(fake, new)
    fake.empty()

    async def work(store: FdStore) -> None:
        await store.keep(old)
        for position in range(count - 1):  # before the last message the commit has succeeded
            await safe(store, fake, *old)
            with killed(fake, *old, *new) as adopted:
                look, left = fake.hook, itertools.count(-position)

                def empty(text: str, look: Any = look, left: Any = left) -> None:
                    if next(left) == 0:
                        fake.empty()
                    look(text)

                fake.hook = empty
                await store.keep(new)
                await store._manager.barrier()
                await safe(store, fake, *old, *new)
            assert adopted[-4:] == [*growing(*old), ids(*old, *new)], position
            await store.take_back(new)

    run(fake, work)
    made.close(*old, *new)


# -- any history -------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.just("keep"), st.lists(st.integers(1, 3), min_size=1, max_size=2))
    | st.tuples(st.just("forget"), st.integers(0, 3))
    | st.tuples(st.just("empty"), st.none())
    | st.tuples(st.just("limit"), st.integers(0, 20)),
    max_size=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_any_history(fake: FakeManager, history: list[tuple[str, Any]]) -> None:
    fake.empty()
    fake.limit = 100
    history = [(step, commit(*what) if step == "keep" else what) for step, what in history]

    async def work(store: FdStore) -> None:
        kept: list[Complete] = []
        for step, what in history:
            match step:
                case "keep":
                    try:
                        await store.keep(what)
                    except StoreRejected:
                        await store._manager.barrier()
                        assert not set(fake.names) & set(names(*what))
                    else:
                        kept += what
                case "forget" if what < len(kept):
                    await store.forget(kept[what].record.id)
                    assert not set(fake.names) & set(names(kept.pop(what)))
                case "empty":
                    await asyncio.to_thread(fake.empty)
                case "limit":
                    await resize(store, fake, what)
        await resize(store, fake, 100)
        await safe(store, fake, *kept)

    try:
        run(fake, work)
    finally:
        made.close(*(complete for step, what in history if step == "keep" for complete in what))
