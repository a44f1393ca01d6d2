"""The user that may see the status and nothing else: the exporter's."""

from __future__ import annotations

import errno
import grp
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.server.harness import Agent, eventually
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.config import Config
from weightcache.errors import PermissionRefused
from weightcache.monitor import view
from weightcache.monitor.site import Site
from weightcache.protocol import Drain, Evict, Inspect, Message, Renew, Status, Verify, Watch
from weightcache.server import markers

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs another user")

NOBODY = 65534
STRANGER = 65533


def as_user(uid: int, check: Callable[[], bool]) -> None:
    """Run ``check`` in a process of another user, in no group of this one's."""
    pid = os.fork()
    if not pid:  # no pytest in here: leave by the shortest way
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refused(agent: Agent, message: Message) -> bool:
    try:
        agent.ask(message)
    except PermissionRefused as error:
        return "may see the status and no more" in error.message
    return False


@pytest.fixture
def observed(agent: Agent) -> Agent:
    agent.folder.chmod(0o755)
    agent.start("--load", "--observer", str(NOBODY))
    agent.await_state("ready")
    return agent


def test_it_sees_the_status(observed: Agent) -> None:
    def sees() -> bool:
        with Conversation(observed.paths.status) as watching:
            watching.send(Watch(0.0))
            message, _ = watching.receive()
        return isinstance(message, protocol.Observed) and observed.status().state == "ready"

    as_user(NOBODY, sees)


@pytest.mark.parametrize(
    "message",
    [Inspect(None), Renew("0" * 12, "target"), Verify(), Evict(None), Drain(0.0)],
    ids=lambda m: type(m).__name__,
)
def test_it_gets_no_weights_and_changes_nothing(observed: Agent, message: Message) -> None:
    as_user(NOBODY, lambda: refused(observed, message))
    status = observed.status()
    assert (status.state, status.sets[0].leases, status.orphans) == ("ready", (), ())


def test_no_other_door_opens_for_it(observed: Agent) -> None:
    def shut(path: object) -> bool:
        try:
            Conversation(path).close()  # type: ignore[arg-type]
        except PermissionRefused:
            return True
        return False

    as_user(NOBODY, lambda: shut(observed.paths.public) and shut(observed.paths.publish))
    as_user(STRANGER, lambda: shut(observed.paths.status))


def test_what_an_agent_leaves_behind_is_for_whoever_may_ask(observed: Agent) -> None:
    file = observed.paths.status_file
    eventually(lambda: json.loads(file.read_text())["state"] == "ready")
    with observed.attach():
        eventually(lambda: json.loads(file.read_text())["sets"][0]["leases"])
        as_user(STRANGER, lambda: not os.access(file, os.R_OK) and not os.access(observed.paths.status, os.W_OK))
        as_user(NOBODY, lambda: os.access(file, os.R_OK) and os.access(observed.paths.status, os.W_OK))
    observed.stop()
    as_user(STRANGER, lambda: view.query(Site(Config(), observed.paths.directory), 0).heard_at == 0)


@pytest.fixture
def private(agent: Agent) -> Agent:
    """What it leaves behind is for one group, and for the observer, who is not in it."""
    agent.folder.chmod(0o755)
    agent.configure(agent={"socket_group": "daemon"})
    agent.start("--load", "--observer", str(NOBODY))
    agent.await_state("ready")
    eventually(lambda: json.loads(agent.paths.status_file.read_text())["state"] == "ready")
    return agent


def test_it_reads_what_an_agent_leaves_behind(private: Agent) -> None:
    file = private.paths.status_file
    found = file.stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o640, grp.getgrnam("daemon").gr_gid)
    as_user(STRANGER, lambda: not os.access(file, os.R_OK))
    as_user(NOBODY, lambda: os.access(file, os.R_OK) and not os.access(file, os.W_OK))

    def left(state: str) -> bool:
        seen = view.query(Site(Config(), private.paths.directory), 0)
        return (seen.agent, seen.status.state) == ("down", state) and seen.heard_at > 0

    private.stop(signal.SIGKILL)
    as_user(NOBODY, lambda: left("ready"))
    private.start("--observer", str(NOBODY)).stop()
    as_user(NOBODY, lambda: left("stopped"))


def test_without_such_entries_the_file_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "setxattr", fail)
    markers.replace(tmp_path / "0.json", "text", 0o640, reader=NOBODY)
    assert (tmp_path / "0.json").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


def test_mode_and_group_of_the_socket_stay(observed: Agent) -> None:
    assert observed.paths.status.stat().st_mode & 0o777 == 0o660


def test_root_is_root_even_if_it_is_named(agent: Agent) -> None:
    agent.start("--observer", "root")
    assert "drained" in agent.ask(Drain(0.0)).text


def test_a_user_that_is_not_there_stops_nothing(agent: Agent) -> None:
    agent.start("--observer", "nobody-of-that-name")
    assert agent.ask(Status(), protocol.RankReport).status.state == "empty"
    assert "there is no user 'nobody-of-that-name'" in agent.text()
