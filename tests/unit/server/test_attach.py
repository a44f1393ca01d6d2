"""Giving out weights: what an attach is answered in each state of the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.support import test_loader
from tests.support.test_loader import fingerprint
from tests.unit.server.harness import LOADER, PYTHON, Agent, contents, eventually, outcome
from weightcache import protocol, transport
from weightcache.errors import (
    ConfigError,
    Empty,
    LoadFailed,
    Mismatch,
    StillLoading,
)
from weightcache.memory import memfd


def test_hello_never_loads(agent: Agent) -> None:
    agent.start()
    with agent.public() as conversation:
        welcome = conversation.request(protocol.Hello("test", "1"), protocol.Welcome)
    assert (welcome.rank, welcome.state, welcome.backend) == (0, "empty", "host")
    assert agent.status().state == "empty"


def test_attach_loads_waits_and_gives_out_sealed_bytes(agent: Agent) -> None:
    agent.start()
    with agent.attach() as held:
        assert isinstance(held.message, protocol.Attached)
        assert held.progress
        assert all(memfd.is_sealed(fd) and not os.get_inheritable(fd) for fd in held.fds)
        assert contents(held) == [test_loader.arena_bytes(0, n, 65536) for n in range(2)]
        status = agent.status()
        assert status.state == "ready"
        assert [lease.pid for lease in status.sets[0].leases] == [os.getpid()]
        assert status.sets[0].version == 1
        assert status.sets[0].leases[0].lease == held.message.lease
    eventually(lambda: not agent.status().sets[0].leases)
    assert agent.status().state == "ready"


def test_two_engines_share_one_set(agent: Agent) -> None:
    agent.start()
    with agent.attach() as first, agent.attach() as second:
        assert first.message.set_id == second.message.set_id
        assert os.fstat(first.fds[1]).st_ino == os.fstat(second.fds[1]).st_ino
        assert len(agent.status().sets[0].leases) == 2


def test_two_engines_that_wait_for_the_same_load(agent: Agent) -> None:
    agent.gate("loading")
    agent.start("--load")
    agent.reached("loading")
    with pytest.raises(StillLoading) as refused:
        agent.attach(wait=0.0)
    assert "phase loading, 65536 of 131072 bytes" in str(refused.value)
    started = time.monotonic()
    with pytest.raises(StillLoading):
        agent.attach(wait=0.7)
    assert 0.6 < time.monotonic() - started < 3
    with agent.public() as a, agent.public() as b:
        for conversation in (a, b):
            conversation.send(protocol.Attach("target", "g", fingerprint(), 20.0))
            message, _ = conversation.receive()
            assert isinstance(message, protocol.Progress)
            assert message.progress.bytes_done == 65536
        agent.open("loading")
        for conversation in (a, b):
            message, fds = outcome(conversation)
            assert isinstance(message, protocol.Attached)
            transport.close_all(fds)


def test_mismatch_names_the_fields_and_their_consequences(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with pytest.raises(Mismatch) as refused:
        agent.attach(fingerprint(tp_size=8, quant_method="fp8"))
    assert [(d.field, d.cached, d.engine) for d in refused.value.differences] == [
        ("tp_size", 1, 8),
        ("quant_method", "a-quant_method", "fp8"),
    ]
    assert all(d.consequence for d in refused.value.differences)
    assert "tp_size, quant_method" in str(refused.value)


def test_mismatch_of_very_long_values_still_fits_a_packet(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with pytest.raises(Mismatch) as refused:
        agent.attach(fingerprint(environment="x" * 150_000))
    assert len(str(refused.value.differences[0].engine)) < 2000


def test_another_model_is_refused_without_a_load(agent: Agent) -> None:
    model = agent.folder / "model"
    model.mkdir()
    agent.configure(model=[f"--model-path={model}"])
    agent.start()
    with pytest.raises(Mismatch) as refused:
        agent.attach(fingerprint(model_path="/elsewhere"))
    assert [d.field for d in refused.value.differences] == ["model_path"]
    assert agent.status().state == "empty"
    with pytest.raises(Mismatch) as refused:  # this one is worth a load, which then shows the rest
        agent.attach(fingerprint(model_path=str(model)))
    assert agent.status().state == "ready"


def test_a_role_that_the_load_does_not_have(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with pytest.raises(Empty, match="only: target"):
        agent.attach(fingerprint(role="draft-1"))


def test_all_sets_of_a_load_appear_together(agent: Agent) -> None:
    agent.configure({"WCTEST_ROLES": "target,draft-1"})
    agent.gate("complete")
    agent.start("--load")
    agent.reached("complete")
    assert agent.status().sets == ()
    agent.open("complete")
    agent.await_state("ready")
    assert [(s.role, s.version) for s in agent.status().sets] == [("target", 1), ("draft-1", 1)]
    with agent.attach() as target, agent.attach(fingerprint(role="draft-1")) as draft:
        assert target.message.set_id != draft.message.set_id
        assert contents(target) != contents(draft)


def test_nothing_configured(agent: Agent) -> None:
    agent.configure(model=None)
    agent.start("--load")
    with pytest.raises(Empty):
        agent.attach()
    with pytest.raises(Empty):
        agent.load()
    assert agent.status().state == "empty"


def test_a_broken_configuration_is_a_state(agent: Agent) -> None:
    agent.configure(loader={"comand": ["x"]})
    agent.start("--load")
    assert agent.status().state == "failed"
    for ask in (agent.attach, agent.load):
        with pytest.raises(ConfigError, match="comand"):
            ask()
    with pytest.raises(ConfigError):
        agent.attach(donate=True)


def test_a_failed_load_is_told_and_then_spaced_out(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "exit"})
    agent.start()
    with pytest.raises(LoadFailed, match=r"ended with status 3.*cannot find the weights"):
        agent.attach()
    status = agent.status()
    assert status.state == "failed"
    assert status.error is not None
    assert status.error.code == "load-failed"
    started = time.monotonic()
    with pytest.raises(LoadFailed, match=r"next try.*cannot find the weights"):
        agent.attach()
    with pytest.raises(LoadFailed, match="next try"):
        agent.load()
    assert time.monotonic() - started < 0.5
    assert agent.text().count("load begins") == 1
    eventually(lambda: _fails_again(agent))


def _fails_again(agent: Agent) -> bool:
    with pytest.raises(LoadFailed):
        agent.attach()
    return agent.text().count("load begins") == 2


def test_the_lease_ends_when_the_engine_is_killed(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    code = (
        f"import sys, time; sys.path[:0] = [{str(agent.named)!r}, {str(LOADER.parents[2])!r}]\n"
        "from tests.unit.server.engine import attach_and_fork; attach_and_fork(sys.argv[1])\n"
    )
    with subprocess.Popen([PYTHON, "-c", code, str(agent.paths.public)], stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            helper = int(engine.stdout.readline())
            [lease] = agent.status().sets[0].leases
            assert lease.pid == engine.pid
            assert lease.command.startswith(f"{PYTHON} -c 'import sys, time")
            assert len(lease.command) == 200
        finally:
            engine.kill()
    # The helper inherited the connection, so only the process's own end can have told the agent.
    eventually(lambda: not agent.status().sets[0].leases)
    os.kill(helper, signal.SIGKILL)


def test_speaking_on_a_lease_ends_it(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with agent.attach() as held:
        held.conversation.send(protocol.Hello("again", "1"))
        eventually(lambda: not agent.status().sets[0].leases)
