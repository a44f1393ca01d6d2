"""The manager's descriptor store when somebody changes the units below a running agent; many sets, several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.test_loader import arena_bytes
from tests.systemd.machine import Machine
from tests.systemd.rank import (
    CANARY,
    ONE_SET,
    RECORD_AND_MANIFEST,
    Client,
    Rank,
    arenas,
    configuration,
    eventually,
    gated,
    reset,
)
from tests.unit.server.harness import contents
from weightcache.errors import StoreRejected
from weightcache.protocol import Evict

Emptying = Callable[[Machine], AbstractContextManager[None]]
UNIT = "/usr/lib/systemd/system/weightcache@.service"


@contextmanager
def without_unit_file(machine: Machine) -> Iterator[None]:
    """As in the middle of an upgrade that goes wrong."""
    path = machine.path(UNIT)
    hidden = path.rename(path.with_name("hidden"))
    machine.systemctl("daemon-reload")
    try:
        yield
    finally:
        hidden.rename(path)
        machine.systemctl("daemon-reload")


def no_room(machine: Machine) -> AbstractContextManager[None]:
    return machine.drop_in("weightcache@0.service", "[Service]\nFileDescriptorStoreMax=0\n")


def too_little_room(machine: Machine) -> AbstractContextManager[None]:
    """The newest stay, and the canary is among them."""
    return machine.drop_in("weightcache@0.service", "[Service]\nFileDescriptorStoreMax=2\n")


@pytest.fixture
def attentive(agents: Machine) -> Iterator[None]:
    """An agent that looks at the store more often."""
    with agents.drop_in("weightcache@.service", gated("WCTEST_PROBE=0.5")):
        yield


@pytest.mark.parametrize("how", [without_unit_file, no_room, too_little_room])
def test_a_reload_that_empties_the_store_is_noticed_and_made_good(
    agents: Machine, attentive: None, rank: Rank, how: Emptying
) -> None:
    before = rank.ready()
    with Client(rank) as client:
        with how(agents):
            eventually(lambda: rank.status().kept == "lost")
            assert rank.stored < ONE_SET
            assert rank.count("store-emptied") == (1,)
            client.unharmed()
            with rank.attach() as held:  # who holds the weights gives them out
                assert held.message.set_id == client.set_id
        eventually(lambda: rank.status().kept == "store")
        eventually(lambda: rank.stored == ONE_SET)  # while it looks, there are two canaries
        assert rank.status().pid == before.pid
        assert rank.killed().sets[0].id == client.set_id
        eventually(client.leased)
        client.unharmed()
    assert rank.count("load-began", "store-emptied", "store-refilled", "set-adopted") == (1, 1, 1, 1)


def test_a_commit_after_such_a_reload_is_refused(agents: Machine, rank: Rank) -> None:
    """The agent knows the limit of its own start at best, so it has to find out."""
    rank.ready()
    rank.ask(Evict(None))
    with agents.drop_in(rank.service, f"[Service]\nFileDescriptorStoreMax={ONE_SET - 1}\n"):
        with pytest.raises(StoreRejected, match="are needed"), rank.attach():
            pass
        rank.no_arenas()
        assert rank.stored == CANARY


def test_status_says_that_a_crash_would_lose_the_weights(agents: Machine, rank: Rank) -> None:
    rank.ready()
    with no_room(agents):
        eventually(lambda: "NOT safe" in rank.status_text)
    eventually(lambda: "NOT safe" not in rank.status_text)


@pytest.mark.parametrize("verb", ["daemon-reload", "daemon-reexec"])
def test_the_manager_starts_over_and_nothing_happens(agents: Machine, rank: Rank, verb: str) -> None:
    before = rank.ready()
    with Client(rank) as client:
        agents.systemctl(verb)
        assert rank.status().pid == before.pid
        assert rank.stored == ONE_SET
        assert rank.killed().sets[0].id == client.set_id
        eventually(client.leased)
        client.unharmed()
    assert rank.count("load-began", "store-emptied", "set-adopted") == (1, 0, 1)


def test_a_load_that_the_store_has_no_room_for_fails(agents: Machine, rank: Rank) -> None:
    with agents.drop_in(rank.service, f"[Service]\nFileDescriptorStoreMax={ONE_SET - 1}\n"):
        assert agents.run("systemctl", "start", rank.service, check=False).returncode == 1
        rank.await_active()
        status = rank.status()
        assert (status.state, status.sets) == ("failed", ())
        assert status.error is not None
        assert status.error.code == "store-rejected"
        assert "FileDescriptorStoreMax=" in rank.status_text
        assert rank.stored == CANARY
        rank.no_arenas()
        # The agent lives, and tries again for whoever asks.
        told = r"raise FileDescriptorStoreMax= .*, run systemctl daemon-reload and restart the unit"
        with pytest.raises(StoreRejected, match=told), rank.attach():
            pass
        assert rank.status().pid == status.pid
        assert rank.stored == CANARY
        rank.no_arenas()
        assert rank.count("load-began", "set-published") == (2, 0)
    # What the error says to do.
    agents.systemctl("restart", rank.service)
    assert rank.stored == ONE_SET
    assert rank.count("load-began", "set-published") == (3, 1)


def test_what_is_evicted_leaves_the_store(rank: Rank) -> None:
    rank.ready()
    rank.ask(Evict(None))
    assert rank.stored == CANARY
    rank.no_arenas()
    rank.killed()
    assert rank.count("set-adopted") == (0,)


def test_three_hundred_arenas_in_two_sets(rank: Rank) -> None:
    sizes = [4096] * 150
    variables = {"WCTEST_ROLES": "target,draft-0", "WCTEST_ARENAS": ",".join(map(str, sizes))}
    rank.write(configuration(variables))
    before = {resident.role: resident.id for resident in rank.ready().sets}
    assert set(before) == {"target", "draft-0"}
    everything = CANARY + 2 * (RECORD_AND_MANIFEST + len(sizes))
    assert rank.stored == everything
    with Client(rank) as target, Client(rank, "draft-0") as draft:
        for _ in range(3):
            assert {resident.role: resident.id for resident in rank.killed().sets} == before
            assert rank.stored == everything
        assert (target.set_id, draft.set_id) == (before["target"], before["draft-0"])
        target.unharmed(sizes)
        draft.unharmed(sizes, seed=1)
        eventually(lambda: target.leased() and draft.leased())
    with rank.attach() as held:
        assert contents(held) == [arena_bytes(0, number, size) for number, size in enumerate(sizes)]
    assert rank.count("load-began", "set-adopted", "verification-failed") == (1, 6, 0)


def test_ranks_side_by_side(agents: Machine, rank: Rank) -> None:
    reset(agents, configuration(), (0, 1))
    other = Rank(agents, 1)
    agents.systemctl("start", rank.service, other.service)
    assert len(arenas(agents)) == 2 * (ONE_SET - CANARY - RECORD_AND_MANIFEST)
    with Client(rank) as here, Client(other) as there:
        assert here.set_id != there.set_id
        pid = other.status().pid
        rank.killed()
        agents.systemctl("stop", rank.service, rank.socket)
        assert rank.stored == 0
        left = sorted(path.name for path in Path(other.paths.directory).iterdir() if path.is_socket())
        assert left == ["1.publish.sock", "1.sock", "1.status.sock", "loader.sock"]
        assert (other.status().pid, other.ids(), other.stored) == (pid, [there.set_id], ONE_SET)
        assert other.killed().sets[0].id == there.set_id
        agents.systemctl("start", rank.socket)
        with rank.attach() as held:
            assert held.message.set_id != here.set_id
        eventually(there.leased)
        here.unharmed()
        there.unharmed()
    assert rank.count("load-began") == (2,)
    assert other.count("load-began", "set-adopted") == (1, 1)
