"""Engines that die of their memory: the set is examined before anybody gets it again."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.test_loader import fingerprint
from tests.unit.server.harness import Agent, eventually
from tests.unit.server.kept import Kept
from weightcache import protocol
from weightcache.errors import DamagedSet, Degraded, StillLoading
from weightcache.protocol import Attached
from weightcache.server import suspicion


def die(agent: Agent, end: Callable[[], object], held_for: float = 0.0) -> None:
    """An engine in a process of its own attaches, and ends by ``end``."""
    pid = os.fork()
    if not pid:  # no pytest in here: leave by the shortest way
        try:
            agent.attach()
            time.sleep(held_for)
            end()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def by(sign: signal.Signals) -> Callable[[], object]:
    def end() -> None:
        signal.signal(sign, signal.SIG_DFL)
        os.kill(os.getpid(), sign)

    return end


@pytest.fixture
def ready(agent: Agent) -> Agent:
    agent.configure()
    agent.start("--load")
    agent.await_state("ready")
    return agent


def kernel_tells() -> bool:
    """Linux 6.15 and later say how a process ended that is no child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        os.read(reader, 1)
        os._exit(7)
    fd = os.pidfd_open(pid)
    os.close(writer)
    os.close(reader)
    os.waitpid(pid, 0)
    code = suspicion._exit_code(fd)
    os.close(fd)
    assert code in (None, 7 << 8)
    return code is not None


@pytest.mark.parametrize("sign", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_fatal_signal_makes_the_set_suspect(ready: Agent, sign: signal.Signals) -> None:
    if not kernel_tells():
        pytest.skip("this kernel does not say how other processes' children end (Linux 6.15 does)")
    set_id = ready.status().sets[0].id
    die(ready, by(sign))
    eventually(lambda: f"set {set_id} is suspect: pid" in ready.text())
    assert f"ended with {sign.name}" in ready.text()
    eventually(lambda: f"set {set_id} verified: " in ready.text())
    with ready.attach() as held:
        assert held.message.set_id == set_id


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_is_ended_says_nothing_about_the_set(ready: Agent, sign: signal.Signals) -> None:
    for _ in range(3):
        die(ready, by(sign))
    time.sleep(suspicion.REAPED_SECONDS)
    assert "suspect" not in ready.text()
    ready.attach().close()


def test_a_device_fault_that_the_engine_reports(ready: Agent) -> None:
    with ready.attach() as held:
        held.conversation.send(protocol.Faulted("CUDA error: uncorrectable ECC error encountered"))
        eventually(lambda: "uncorrectable ECC error" in ready.text())
    eventually(lambda: " verified: " in ready.text())
    ready.attach().close()


@pytest.mark.parametrize("step", [-7200, 7200])
def test_a_clock_that_is_set_drops_no_suspicion(kept: Kept, step: int) -> None:
    """Neither the first death nor that the second one came after it."""
    offset, following = kept.folder / "offset", kept.folder / "following"
    offset.write_text("0")
    kept.patch = f"import time; real = time.time; time.time = lambda: real() + int(open({str(offset)!r}).read())"
    kept.start("--load")
    since = kept.await_state("ready").sets[0].published_at
    for count in (1, 2):
        with kept.attach() as held:
            following.write_text(str(count * step))
            following.rename(offset)
            held.conversation.send(protocol.Faulted("CUDA error: unspecified launch failure"))
            eventually(lambda count=count: kept.text().count(" is suspect: pid") == count)
            eventually(lambda count=count: kept.text().count(" verified: ") == count)
    assert len(re.findall(r" is suspect: pid \d+, attached for \d s, CUDA error", kept.text())) == 2
    eventually(lambda: kept.status().state == "degraded")
    kept.ask(protocol.Evict(None))
    kept.load()
    assert abs(kept.status().sets[0].published_at - since - 2 * step) < 600  # the clock was set indeed


def test_nobody_gets_a_suspect_set_before_the_verdict(agent: Agent) -> None:
    agent.configure()
    agent.start("--load")
    agent.await_state("ready")
    agent.gate("checking")
    with agent.attach() as first:
        first.conversation.send(protocol.Faulted("CUDA error: an illegal memory access was encountered"))
        agent.reached("checking")
        with pytest.raises(StillLoading, match="is being verified: pid"):
            agent.attach(wait=0.0)
        with agent.public() as waiting:
            waiting.send(protocol.Attach("target", "g", fingerprint(), 20.0))
            message, _ = waiting.receive()
            assert isinstance(message, protocol.Progress)
            assert message.progress.phase == "verifying"
            agent.open("checking")
            while isinstance(message, protocol.Progress):
                message, fds = waiting.receive(max_fds=10)
            assert isinstance(message, Attached)
            for fd in fds:
                os.close(fd)


def test_two_deaths_in_a_row_stop_the_giving_out(ready: Agent) -> None:
    for count in (1, 2):
        with ready.attach() as held:
            held.conversation.send(protocol.Faulted("CUDA error: unspecified launch failure"))
            eventually(lambda count=count: ready.text().count(" verified: ") == count)
    eventually(lambda: ready.status().state == "degraded")
    error = ready.status().error
    assert error is not None
    assert "2 engines in a row died soon after they attached" in error.message
    with pytest.raises(Degraded):
        ready.attach()
    ready.ask(protocol.Evict(None))
    ready.load()
    ready.attach().close()


def test_engines_that_die_of_the_same_event_count_once(ready: Agent) -> None:
    with ready.attach() as one, ready.attach() as other:
        for held in (one, other):
            held.conversation.send(protocol.Faulted("CUDA error: uncorrectable ECC error encountered"))
        eventually(lambda: ready.text().count(" verified: ") == 2)
    assert ready.text().count("is suspect") == 2
    assert ready.status().state == "ready"
    ready.attach().close()


def test_a_verdict_on_two_sets_outlives_the_agent_and_one_eviction(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "wrong-digest", "WCTEST_ROLES": "target,draft-0"}, policy={"damaged": "hold"})
    agent.start("--load")
    agent.await_state("ready")
    for _ in range(2):
        with pytest.raises(DamagedSet):
            agent.ask(protocol.Verify(), protocol.Verified)
    marker = json.loads(agent.paths.damage_marker.read_text())
    first, second = (s.id for s in agent.status().sets)
    assert list(marker["reasons"]) == [first]  # the check of all sets stops at the first that is damaged
    agent.ask(protocol.Evict(first))
    with pytest.raises(DamagedSet):
        agent.ask(protocol.Verify(), protocol.Verified)
    eventually(lambda: list(json.loads(agent.paths.damage_marker.read_text())["reasons"]) == [second])
    agent.ask(protocol.Evict(second))
    eventually(lambda: not agent.paths.damage_marker.exists())


def test_a_bad_set_is_replaced_after_a_death(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "wrong-digest"})
    agent.start("--load")
    first = agent.await_state("ready").sets[0].id
    with agent.attach() as held:
        held.conversation.send(protocol.Faulted("CUDA error: uncorrectable ECC error encountered"))
    eventually(lambda: [s.id for s in agent.status().sets] not in ([], [first]))
    assert "is damaged" in agent.text()
