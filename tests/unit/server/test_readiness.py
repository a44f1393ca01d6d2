"""A real agent below a service manager: what outlives it, and when it says that it is up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import test_loader
from tests.unit.server.harness import PYTHON, Agent, contents, eventually, gone, outcome
from tests.unit.server.kept import Kept, Managed
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.errors import Drained, InUse, LoadFailed, WeightcacheError

EXPECTED = [test_loader.arena_bytes(0, number, size) for number, size in enumerate(test_loader.ARENAS)]
STORED = 1 + 1 + len(EXPECTED)


def bytes_of(agent: Agent) -> tuple[str, list[bytes]]:
    with agent.attach() as held:
        found = held.message.set_id, contents(held)
    eventually(lambda: not any(s.leases for s in agent.status().sets if s.id == found[0]))
    return found


# -- below the keeper --------------------------------------------------------------------------------------------------


def test_ten_kills_at_rest(kept: Kept) -> None:
    kept.start("--load")
    first = kept.await_state("ready")
    set_id = first.sets[0].id
    assert (first.kept, first.sets[0].version) == ("store", 1)
    kept.configure(loader={"command": []}, model=None)  # nothing that could load again, or verify
    with kept.attach() as engine:
        assert contents(engine) == EXPECTED
        for _ in range(10):
            status = kept.kill()
            assert status.state == "ready"
            assert [(s.id, s.version, s.published_at, s.digest) for s in status.sets] == [
                (s.id, s.version, s.published_at, s.digest) for s in first.sets
            ]
            # The engine's lease ended with the agent; it renews it on the status socket.
            with kept.renew(set_id) as renewed:
                assert renewed.message.resident
                assert [lease.pid for lease in kept.status().sets[0].leases] == [os.getpid()]
                with pytest.raises(InUse):
                    kept.ask(protocol.Evict(None))
            with kept.attach() as other:
                assert (other.message.set_id, contents(other)) == (set_id, EXPECTED)
        assert contents(engine) == EXPECTED
    assert kept.status().kept == "store"
    assert kept.loads() == 1
    assert "belong to no complete set" not in kept.text()


def test_a_set_that_was_evicted_or_replaced_is_not_adopted(kept: Kept) -> None:
    kept.start("--load")
    first = kept.await_state("ready").sets[0]
    kept.ask(protocol.Evict(None))
    kept.load()
    [second] = kept.status().sets
    assert (second.version, second.id != first.id) == (2, True)
    status = kept.kill()
    assert [(s.id, s.version) for s in status.sets] == [(second.id, 2)]
    kept.ask(protocol.Evict(None))
    eventually(lambda: kept.status().sets == ())
    kept.kill()
    kept.await_state("ready")  # --load, and nothing there
    assert kept.loads() == 3


def test_a_target_whose_draft_was_evicted_is_adopted(kept: Kept) -> None:
    """It is as good as before."""
    kept.configure({"WCTEST_ROLES": "target,draft-1"})
    kept.start("--load")
    sets = {s.role: s for s in kept.await_state("ready").sets}
    kept.ask(protocol.Evict(sets["draft-1"].id))
    left = sets["target"]
    for _ in range(2):
        [found] = kept.kill().sets
        assert (found.id, found.role, found.digest) == (left.id, "target", left.digest)
    with kept.attach() as engine:
        assert engine.message.set_id == left.id
    assert kept.status().kept == "store"
    assert kept.loads() == 1


def test_a_draft_alone_is_no_reason_to_be_ready(kept: Kept) -> None:
    """Its target was evicted: engines are told so, or get it loaded again; so does the next agent, by itself."""
    kept.configure({"WCTEST_ROLES": "target,draft-1"})
    kept.start("--load")
    sets = {s.role: s for s in kept.await_state("ready").sets}
    kept.ask(protocol.Evict(sets["target"].id))
    assert kept.status().state == "empty"
    with kept.attach() as engine:
        assert engine.message.set_id not in {s.id for s in sets.values()}
    assert kept.loads() == 2
    for resident in kept.await_state("ready").sets:
        if resident.role == "target":
            kept.ask(protocol.Evict(resident.id))
    kept.kill()
    assert {s.role for s in kept.await_state("ready").sets} == {"target", "draft-1"}
    assert kept.loads() == 3


def test_a_kill_at_every_stage_of_a_load(kept: Kept) -> None:
    """Acknowledged or not: a commit that was stored whole is there for good, and nothing else is."""
    kept.configure({"WCTEST_ROLES": "target,draft-1"})
    loads = 0
    for gate in ("started", "begun", "loading", "staged", "complete", "committed"):
        kept.gate(gate)
        if not kept.started:
            kept.start("--load")
        else:
            kept.ask(protocol.Evict(None))
            with kept.public() as conversation:
                conversation.send(protocol.Load(10.0))
                kept.reached(gate)
        loader = kept.reached(gate)
        (kept.gates / gate).unlink()  # the next loader passes
        kept.kill()
        eventually(lambda pid=loader: gone(pid), what="the loader outlived its agent")
        before = kept.await_state("ready").sets
        loads += 1 if gate == "committed" else 2
        assert kept.loads() == loads
        assert [s.role for s in before] == ["target", "draft-1"]
        assert bytes_of(kept)[1] == EXPECTED
        after = kept.kill().sets
        assert [s.id for s in after] == [s.id for s in before]
        assert bytes_of(kept)[1] == EXPECTED
        assert kept.loads() == loads


DYING = """
import os
from weightcache.server import notify
store, trap = notify.Manager.store, os.environ["TRAP"]
async def dying(self, name, fd):
    await store(self, name, fd)
    if os.path.exists(trap):
        left = int(open(trap).read()) - 1
        if left:
            open(trap, "w").write(str(left))
        else:
            os.unlink(trap)
            os.kill(os.getpid(), 9)
notify.Manager.store = dying
"""


@pytest.mark.parametrize("roles", ["target", "target,draft-1"])
def test_a_kill_at_every_descriptor_of_a_commit(kept: Kept, roles: str) -> None:
    """A commit that is stored in part is never adopted, and its parts do not stay in the store."""
    count = len(roles.split(","))
    trap = kept.folder / "trap"
    kept.configure({"WCTEST_ROLES": roles})
    kept.patch = DYING
    kept.environment["TRAP"] = str(trap)
    kept.start()
    eventually(lambda: kept.status().kept == "store")
    time.sleep(0.1)  # the first canary
    for position in range(1, STORED * count + 2):
        log, loads = len(kept.text()), kept.loads()
        kept.ask(protocol.Evict(None))
        trap.write_text(str(position))
        victim = kept.pid
        with contextlib.suppress(WeightcacheError):
            kept.load()
        kept.successor(victim)
        assert not trap.exists()
        whole = position >= STORED * count
        assert len(kept.status().sets) == whole * count, position
        assert ("belong to no complete set" in kept.text()[log:]) is not whole
        kept.load()
        assert kept.loads() == loads + 2 - whole
        log = len(kept.text())
        kept.kill()
        assert bytes_of(kept)[1] == EXPECTED
        assert "belong to no complete set" not in kept.text()[log:]


def holders(inodes: set[int]) -> list[int]:
    """The processes, other than this one, that show such files."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if fd.stat().st_ino in inodes and fd.parts[2] != str(os.getpid()):
                found.append(int(fd.parts[2]))
    return sorted(set(found))


def test_the_end_of_the_keeper_frees_the_weights(kept: Kept) -> None:
    kept.start("--load")
    kept.await_state("ready")
    assert kept.process is not None
    with kept.attach() as held:
        inodes = {os.fstat(fd).st_ino for fd in held.fds}
        pids = sorted([kept.process.pid, kept.pid])
        # Of processes that are not dumpable only root sees the files.
        assert holders(inodes) in ([], pids)
        assert kept.stop() == 0
        assert all(gone(pid) for pid in pids)
        assert holders(inodes) == []


def test_a_broken_configuration_serves_what_is_held(kept: Kept) -> None:
    kept.start("--load")
    set_id = kept.await_state("ready").sets[0].id
    (kept.folder / "config.toml").write_text('[memory]\nbackand = "host"\n')
    status = kept.kill()
    assert (status.state, status.backend, status.model) == ("ready", "host", "a-model")
    assert status.error is not None
    assert "memory.backand" in status.error.message
    assert bytes_of(kept) == (set_id, EXPECTED)
    with kept.public() as conversation:
        welcome = conversation.request(protocol.Hello("test", "1"), protocol.Welcome)
    assert welcome.backend == "host"
    kept.configure()
    assert kept.kill().error is None
    assert bytes_of(kept) == (set_id, EXPECTED)
    assert kept.loads() == 1


def test_a_drained_rank_stays_drained_and_empty(kept: Kept) -> None:
    kept.start("--load")
    kept.await_state("ready")
    kept.ask(protocol.Drain(5.0))
    status = kept.kill()
    assert (status.state, status.sets) == ("drained", ())
    with pytest.raises(Drained):
        kept.attach()
    assert "with 1 stored descriptors" in kept.text().rpartition("keeper: starting")[2]
    kept.ask(protocol.Resume())
    assert kept.status().state == "empty"
    assert kept.loads() == 1


def test_a_store_that_is_too_small(kept: Kept) -> None:
    """The load fails with a sentence that says what to do; the agent goes on, and tries no second time by itself."""
    kept.start(options=("--store-max", str(STORED)))
    with pytest.raises(WeightcacheError, match=rf"keeps {STORED} and {STORED + 2} are needed.*FileDescriptorStoreMax"):
        kept.load()
    status = kept.status()
    assert (status.state, status.sets) == ("failed", ())
    kept.stop()
    kept.start(options=("--store-max", str(STORED + 2)))
    kept.load()
    assert kept.status().kept == "store"


# -- what the manager is told ------------------------------------------------------------------------------------------


def test_ready_means_resident(managed: Managed) -> None:
    managed.gate("loading")
    managed.start("--load")
    managed.reached("loading")
    eventually(lambda: managed.manager.status.startswith("loading: loading, 50 % of 0.0 GB"))
    assert managed.manager.sent("EXTEND_TIMEOUT_USEC=")
    assert not managed.ready()
    managed.open("loading")
    managed.await_ready()
    assert managed.status().state == "ready"
    assert len(managed.manager.names) == STORED
    eventually(lambda: managed.manager.status == "ready: a-model (0.0 GB), 0 engines")
    with managed.attach():
        eventually(lambda: managed.manager.status.endswith("1 engine"))
    assert managed.stop() == 0
    assert managed.manager.sent("STOPPING=1")
    assert len(managed.manager.sent("READY=1")) == 1
    assert managed.manager.messages[-1] == "STOPPING=1"


def test_nothing_to_load_is_ready_too(managed: Managed) -> None:
    managed.configure(model=None)
    managed.start("--load")
    assert managed.await_ready().state == "empty"


def test_what_is_adopted_is_ready_at_once(managed: Managed) -> None:
    managed.start("--load")
    set_id = managed.await_ready().sets[0].id
    stored = dict(managed.manager.stored)
    managed.stop(signal.SIGKILL)
    managed.start("--load")
    assert [s.id for s in managed.await_ready().sets] == [set_id]
    assert managed.loads() == 1
    assert len(managed.manager.canaries) == 1
    assert not set(managed.manager.canaries) & set(stored)
    managed.manager.empty()
    eventually(lambda: len(managed.manager.names) == STORED)
    eventually(lambda: managed.status().kept == "store")


def test_lost_descriptors_are_shown(managed: Managed) -> None:
    managed.start("--load")
    managed.await_ready()
    managed.manager.limit = 2
    managed.manager.empty()
    eventually(lambda: "NOT safe" in managed.manager.status)
    assert managed.status().kept == "lost"
    assert managed.status().state == "ready"
    managed.manager.limit = 100
    eventually(lambda: managed.status().kept == "store")
    eventually(lambda: "NOT safe" not in managed.manager.status)


def test_a_first_load_that_fails_fails_the_start(managed: Managed) -> None:
    """Everybody who waits is told why; the next agent shows the failure, and is up without another try."""
    managed.configure({"WCTEST_MODE": "exit"})
    managed.gate("started")
    managed.listen()
    managed.start("--load")
    managed.reached("started")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(managed.public()) for _ in range(20)]
        for number, client in enumerate(clients):
            client.send(protocol.Load(30.0) if number % 2 else attach())
        managed.open("started")
        for client in clients:
            with pytest.raises(LoadFailed, match=r"ended with status 3.*cannot find the weights"):
                outcome(client)
    assert managed.process is not None
    assert managed.process.wait(10) == 1
    assert not managed.ready()
    assert "cannot find the weights" in managed.manager.status
    assert managed.manager.status.startswith("failed: ")
    for _ in range(2):  # the automatic restart, and one after a crash
        managed.start("--load")
        status = managed.await_ready()
        assert status.state == "failed"
        assert status.error is not None
        assert "cannot find the weights" in status.error.message
        eventually(lambda: managed.manager.status.startswith("failed: the loader ended with status 3"))
        managed.stop(signal.SIGKILL)
    assert managed.loads() == 1
    managed.configure()
    managed.start("--load")
    managed.await_ready()
    managed.load()  # somebody asks
    managed.stop()
    assert managed.loads() == 2


def attach() -> protocol.Attach:
    return protocol.Attach("target", "g", test_loader.fingerprint(), 30.0)


def test_a_later_failure_ends_nothing(managed: Managed) -> None:
    managed.start()
    managed.await_ready()
    managed.stop()
    managed.configure({"WCTEST_MODE": "exit"})
    managed.start()
    managed.await_ready()
    with pytest.raises(LoadFailed):
        managed.load()
    assert managed.status().state == "failed"
    assert managed.process is not None
    assert managed.process.poll() is None


def test_a_broken_configuration_fails_the_first_start(managed: Managed) -> None:
    (managed.folder / "config.toml").write_text("[memory]\nbackand = 1\n")
    managed.start("--load", wait=False)
    assert managed.process is not None
    assert managed.process.wait(10) == 78
    assert "memory.backand" in managed.manager.status
    managed.start("--load")
    assert managed.await_ready().state == "failed"


BRIEF = "from weightcache.server import readiness; readiness.ACTIVATION_SECONDS = 0.5"


def test_a_question_that_starts_the_agent_loads_nothing(managed: Managed) -> None:
    managed.listen()
    managed.patch = BRIEF
    with Conversation(managed.paths.public) as client:
        client.send(protocol.Hello("test", "1"))
        managed.start("--load")
        assert isinstance(client.receive()[0], protocol.Welcome)
    assert managed.await_ready().state == "empty"
    assert managed.loads() == 0


def test_an_engine_that_starts_the_agent_loads(managed: Managed) -> None:
    managed.listen()
    managed.patch = BRIEF
    managed.gate("loading")
    with Conversation(managed.paths.public) as client:
        client.send(attach())
        managed.start("--load")
        managed.reached("loading")
        assert not managed.ready()
        managed.open("loading")
        message, fds = outcome(client)
        assert isinstance(message, protocol.Attached)
        for fd in fds:
            os.close(fd)
    assert managed.await_ready().state == "ready"
    assert managed.loads() == 1


def test_an_engine_whose_load_fails_fails_the_start(managed: Managed) -> None:
    managed.listen()
    managed.patch = BRIEF
    managed.configure({"WCTEST_MODE": "exit"})
    with Conversation(managed.paths.public) as client:
        client.send(attach())
        managed.start("--load", wait=False)
        with pytest.raises(LoadFailed):
            outcome(client)
    assert managed.process is not None
    assert managed.process.wait(10) == 1


def test_a_donor_that_starts_the_agent_is_not_waited_for(managed: Managed) -> None:
    """Its load may take long and fail: neither is the agent's."""
    managed.listen()
    managed.patch = BRIEF
    with Conversation(managed.paths.public) as client:
        client.send(protocol.Attach("target", "g", test_loader.fingerprint(), 30.0, donate=True))
        managed.start("--load")
        invited, _ = client.receive()
        assert isinstance(invited, protocol.DonationInvited)
        managed.await_ready()
        with Conversation(managed.paths.publish) as donor:
            donor.request(protocol.Begin("donor", "g", invited.token), protocol.Accepted)
            donor.send(protocol.Abort("internal", "no"))
        managed.await_state("empty")
    assert not managed.paths.failed_marker.exists()
    assert managed.loads() == 0


def test_the_watchdog(managed: Managed) -> None:
    """Pings come from the event loop, from the start and while a load runs."""
    managed.environment["WATCHDOG_USEC"] = "300000"
    managed.gate("loading")
    managed.start("--load")
    managed.reached("loading")
    managed.manager.await_sent("WATCHDOG=1", len(managed.manager.sent("WATCHDOG=1")) + 5)
    managed.open("loading")
    managed.await_ready()
    managed.manager.await_sent("WATCHDOG=1", len(managed.manager.sent("WATCHDOG=1")) + 5)


def test_a_stop_while_the_first_load_runs(managed: Managed) -> None:
    managed.gate("loading")
    managed.start("--load")
    loader = managed.reached("loading")
    assert managed.stop() == 0
    assert gone(loader)
    assert not managed.paths.failed_marker.exists()
    assert not managed.ready()


def test_without_the_library(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(agent.folder / "notify"))
    agent.start(wait=False)
    assert agent.process is not None
    assert agent.process.wait(10) == 70
    assert agent.text() == (
        "rank 0: NOTIFY_SOCKET is set and the package sdnotify is missing (No module named 'sdnotify')\n"
    )


def test_the_loader_knows_nothing_of_the_manager(managed: Managed) -> None:
    managed.gate("begun")
    managed.environment |= {"WATCHDOG_USEC": "10000000", "FDSTORE": "100"}
    managed.start("--load")
    loader = managed.reached("begun")
    environment = Path(f"/proc/{loader}/environ").read_bytes()
    for name in (b"LISTEN_", b"NOTIFY_", b"WATCHDOG_", b"FDSTORE"):
        assert name not in environment
    assert PYTHON.encode() in Path(f"/proc/{loader}/cmdline").read_bytes()
