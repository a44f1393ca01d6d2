"""The user that may see the status and nothing else: the exporter's."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.unit.server.harness import Agent
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.errors import PermissionRefused
from weightcache.protocol import Drain, Evict, Inspect, Message, Renew, Status, Verify, Watch

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


def test_mode_and_group_of_the_socket_stay(observed: Agent) -> None:
    assert observed.paths.status.stat().st_mode & 0o777 == 0o660


def test_root_is_root_even_if_it_is_named(agent: Agent) -> None:
    agent.start("--observer", "root")
    assert "drained" in agent.ask(Drain(0.0)).text


def test_a_user_that_is_not_there_stops_nothing(agent: Agent) -> None:
    agent.start("--observer", "nobody-of-that-name")
    assert agent.ask(Status(), protocol.RankReport).status.state == "empty"
    assert "there is no user 'nobody-of-that-name'" in agent.text()
