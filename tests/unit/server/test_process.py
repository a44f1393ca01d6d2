"""The process: sockets, signals, files, memory, and what it imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import test_loader
from tests.support.test_loader import fingerprint
from tests.unit.server import harness
from tests.unit.server.harness import Agent, donation, eventually, gone
from weightcache import protocol, records
from weightcache.client import Conversation
from weightcache.errors import ConfigError, WeightcacheError
from weightcache.paths import RankPaths

MIB = 1 << 20


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def resident_bytes(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def test_sockets_and_their_modes(agent: Agent) -> None:
    agent.start()
    paths = agent.paths
    assert [mode_of(p) for p in (paths.public, paths.status, paths.publish)] == [0o660, 0o660, 0o600]
    assert mode_of(paths.directory) == 0o755
    agent.stop()
    assert not any(p.exists() for p in (paths.public, paths.status, paths.publish))
    agent.configure(policy={"publishers": ["65534"]})
    agent.start()
    assert mode_of(paths.publish) == 0o660


def test_a_directory_that_another_user_may_have_made_is_not_served_in(agent: Agent) -> None:
    shared, victim = agent.folder / "shared", agent.folder / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.mkdir()
    agent.paths = RankPaths(shared / "run", 0)
    agent.paths.directory.symlink_to(victim)
    agent.start(wait=False)
    assert agent.process is not None
    assert agent.process.wait(harness.SECONDS) == ConfigError.exit_status
    assert agent.text().count("\n") == 1
    assert f"{agent.paths.directory} must be a directory that belongs to uid {os.getuid()}" in agent.text()
    assert not list(victim.iterdir())


def test_stop_says_so_and_exits_cleanly(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with agent.attach():
        assert agent.stop() == 0
    left = json.loads(agent.paths.status_file.read_text())
    assert (left["state"], left["sets"]) == ("stopped", [])


def test_stop_ends_the_loader(agent: Agent) -> None:
    agent.gate("loading")
    agent.start("--load")
    pid = agent.reached("loading")
    with agent.public() as waiter:
        waiter.send(protocol.Attach("target", "g", fingerprint(), 10.0))
        waiter.receive()
        assert agent.stop() == 0
        with pytest.raises(WeightcacheError):
            harness.outcome(waiter)
    assert gone(pid)
    assert agent.text().count("load begins") == 1
    assert not agent.paths.failed_marker.exists()


def test_a_hangup_is_ignored(agent: Agent) -> None:
    agent.start()
    os.kill(agent.pid, signal.SIGHUP)
    agent.load()
    assert agent.status().state == "ready"


def test_a_killed_agent_is_replaced_and_a_living_one_is_not(agent: Agent) -> None:
    agent.start()
    os.kill(agent.pid, signal.SIGSTOP)  # even a wedged agent is an agent
    first = agent.process
    assert first is not None
    agent.start(wait=False)
    assert agent.process is not None
    assert agent.process.wait(10) != 0
    assert "another agent answers" in agent.text()
    first.kill()
    first.wait()
    agent.start()
    agent.load()


def test_no_file_that_is_no_socket_is_removed(agent: Agent) -> None:
    agent.paths.directory.mkdir()
    agent.paths.public.write_text("precious")
    agent.start(wait=False)
    assert agent.process is not None
    assert agent.process.wait(10) != 0
    assert agent.paths.public.read_text() == "precious"


def test_a_socket_that_is_handed_in(agent: Agent) -> None:
    """Connections that wait in its queue are served, also by the next agent; no child gets it; nobody unlinks it."""
    agent.paths.directory.mkdir()
    agent.gate("begun")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(agent.paths.public))
        listener.listen(10)
        identity = agent.paths.public.stat().st_ino
        with Conversation(agent.paths.public) as early:
            early.send(protocol.Hello("test", "1"))
            start_with(agent, listener)
            assert isinstance(early.receive()[0], protocol.Welcome)
        with agent.public() as conversation:
            conversation.send(protocol.Load(10.0))
            loader = agent.reached("begun")
            assert b"LISTEN_" not in Path(f"/proc/{loader}/environ").read_bytes()
            kinds = [str(p.readlink()) for p in Path(f"/proc/{loader}/fd").iterdir()]
            assert sum(kind.startswith("socket:") for kind in kinds) == 1, kinds
        with Conversation(agent.paths.public) as queued:
            os.kill(agent.pid, signal.SIGSTOP)
            queued.send(protocol.Hello("test", "1"))
        with Conversation(agent.paths.public) as waiting:
            agent.stop(signal.SIGKILL)
            waiting.send(protocol.Hello("test", "1"))
            start_with(agent, listener)
            assert isinstance(waiting.receive()[0], protocol.Welcome)
        eventually(lambda: gone(loader), what="a loader outlived its agent")
        agent.stop()
        assert agent.paths.public.stat().st_ino == identity


def start_with(agent: Agent, listener: socket.socket) -> None:
    """Start the agent as the service manager does: the listener and a stray descriptor, by number."""
    stray, other = os.pipe()
    number = listener.fileno()
    script = (
        f"import fcntl, os, sys; high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in ({number}, {stray})]\n"
        "for place, fd in enumerate(high): os.dup2(fd, 3 + place)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '2', 'LISTEN_FDNAMES': 'a:b'}\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    arguments = [harness.PYTHON, "-c", script, harness.PYTHON, "-I", "-c", harness.MAIN, str(agent.named)]
    arguments += ["--rank", "0", "--config", str(agent.folder / "config.toml")]
    arguments += ["--runtime-dir", str(agent.paths.directory)]
    agent.configure()
    with agent.log.open("ab") as log:
        agent.process = subprocess.Popen(arguments, stderr=log, pass_fds=[number, stray])
    os.close(stray)
    eventually(agent.paths.status.exists)
    eventually(lambda: "closing descriptors that belong to no complete set: b" in agent.text())
    os.close(other)


def test_the_status_file_follows(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")

    def written() -> protocol.RankStatus:
        return records.from_plain(protocol.RankStatus, json.loads(agent.paths.status_file.read_text()))

    eventually(agent.paths.status_file.exists)
    eventually(lambda: written().state == "ready")
    # Who may ask what is the case may read what was the case.
    assert (mode_of(agent.paths.status_file), mode_of(agent.paths.status)) == (0o640, 0o660)
    assert agent.paths.status_file.stat().st_gid == agent.paths.status.stat().st_gid
    with agent.attach() as held:
        eventually(lambda: [x.lease for x in written().sets[0].leases] == [held.message.lease])
    eventually(lambda: not written().sets[0].leases)


def test_a_status_file_that_cannot_be_written_stops_nothing(agent: Agent) -> None:
    agent.paths.status_file.mkdir(parents=True)
    agent.start()
    agent.load()
    with agent.attach():
        pass
    eventually(lambda: not agent.status().sets[0].leases)
    assert agent.stop() == 0
    assert agent.text().count("cannot write") == 1


def test_it_is_not_dumpable(agent: Agent) -> None:
    agent.start()
    # procfs gives the files of a process that is not dumpable to root (proc(5)); for root, its state says the same.
    assert Path(f"/proc/{agent.pid}/fd").stat().st_uid == 0
    limit = next(line for line in Path(f"/proc/{agent.pid}/limits").read_text().splitlines() if "open files" in line)
    assert limit.split()[3] == limit.split()[4]


def test_memory_stays_small(agent: Agent) -> None:
    agent.start()
    idle = resident_bytes(agent.pid)
    agent.load()
    for _ in range(20):
        with agent.attach():
            pass
    used = resident_bytes(agent.pid)
    print(f"resident: {idle / MIB:.1f} MiB idle, {used / MIB:.1f} MiB with a set and after 20 attaches")
    assert max(idle, used) < 30e6


DUMPING = f"""
import json, os, signal, sys
bare = set(sys.modules)
def dump(*_):
    found = {{name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name not in bare}}
    with open(os.environ["DUMP"] + ".new", "w") as file:
        json.dump(found, file)
    os.rename(os.environ["DUMP"] + ".new", os.environ["DUMP"])
signal.signal(signal.SIGUSR1, dump)
{harness.MAIN.removeprefix("import sys; ")}
"""


def test_no_verb_imports_anything(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = agent.folder / "modules"
    monkeypatch.setattr(harness, "MAIN", DUMPING)
    monkeypatch.setenv("DUMP", str(dump))
    agent.configure(policy={"clients_may_evict_unleased": True})
    agent.start(wait=False)
    eventually(lambda: agent.log.exists() and "serving at" in agent.text())

    def modules() -> dict[str, str | None]:
        dump.unlink(missing_ok=True)
        os.kill(agent.pid, signal.SIGUSR1)
        eventually(dump.exists)
        found: dict[str, str | None] = json.loads(dump.read_text())
        return found

    before = modules()
    exercise(agent)
    after = modules()
    assert sorted(set(after) - set(before)) == []
    foreign = {
        name
        for name in after
        if name.partition(".")[0] not in sys.stdlib_module_names | {"weightcache", "__main__", "__mp_main__"}
    }
    assert foreign == set()


def exercise(agent: Agent) -> None:
    """Every verb, and a failure of every kind that is cheap to have."""
    with agent.public() as conversation:
        conversation.request(protocol.Hello("test", "1"), protocol.Welcome)
    with agent.attach(donate=True) as donor, donation(agent, donor.message.token) as conversation:
        conversation.send(protocol.Progress(protocol.LoadProgress("loading", 1, 2, 0.0)))
        test_loader.publish(conversation, test_loader.make(fingerprint()))
        conversation.request(protocol.Commit(1), protocol.Committed)
    with agent.attach(donate=True), pytest.raises(WeightcacheError):
        agent.ask(protocol.Evict(None))
    eventually(lambda: not agent.status().sets[0].leases)
    agent.ask(protocol.Evict(None))
    with agent.attach(donate=True) as donor, donation(agent, donor.message.token) as conversation:
        conversation.send(protocol.Abort("internal", "no"))
    agent.await_state("empty")
    agent.load()
    with pytest.raises(WeightcacheError):
        agent.attach(fingerprint(tp_size=2))
    with agent.attach() as held, agent.renew(held.message.set_id), agent.renew("0" * 12):
        agent.ask(protocol.Verify(), protocol.Verified)
    with Conversation(agent.paths.status) as conversation:
        conversation.send(protocol.Inspect(None))
        conversation.receive(max_fds=3)
    with Conversation(agent.paths.public) as conversation:
        conversation.sock.send(b"garbage")
        with pytest.raises(WeightcacheError):
            conversation.receive()
    agent.ask(protocol.Drain(5.0))
    with pytest.raises(WeightcacheError):
        agent.attach()
    agent.ask(protocol.Resume())
    agent.gate("loading")
    agent.gate("staged")
    with agent.public() as conversation:
        conversation.send(protocol.Load(5.0))
        os.kill(agent.reached("loading"), signal.SIGKILL)
        with pytest.raises(WeightcacheError):
            harness.outcome(conversation)


@pytest.mark.parametrize(("policy", "told"), [({}, []), ({"unproven": "check"}, ["--unproven", "check"])])
def test_the_loader_is_told_what_to_do_with_unproven_methods(
    agent: Agent, policy: dict[str, str], told: list[str]
) -> None:
    seen = agent.folder / "seen"
    record = (
        f"import os, sys; open({str(seen)!r}, 'w').write(repr(sys.argv)); os.execv({harness.PYTHON!r}, sys.argv[1:])"
    )
    command = [harness.PYTHON, "-c", record, harness.PYTHON, str(harness.LOADER)]
    agent.configure(loader={"command": command}, policy=policy)
    agent.start("--load")
    agent.await_state("ready")
    arguments = seen.read_text()
    assert ("--unproven" in arguments) is bool(told)
    assert repr(told)[1:-1] in arguments
