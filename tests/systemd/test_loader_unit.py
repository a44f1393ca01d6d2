"""Loads in a unit of their own: whatever becomes of them, the agent says why, and nothing of them is left."""

from __future__ import annotations

import pytest

from tests.support.test_loader import ARENAS
from tests.systemd.machine import Machine
from tests.systemd.rank import CANARY, ONE_SET, Client, Rank, arenas, configuration, eventually
from weightcache.errors import CheckpointError, LoadFailed, WeightcacheError
from weightcache.protocol import Evict


def nothing_is_left(rank: Rank) -> None:
    """Of a load that failed: no loader, no memory, no descriptor, and an agent that serves."""
    rank.no_loader()
    rank.no_arenas()
    rank.await_active()
    eventually(lambda: rank.stored == CANARY)
    assert rank.status().state == "failed"
    assert rank.machine.systemctl("list-units", "--failed", "--plain", "--no-legend") == ""


def unit_of(machine: Machine, pid: int) -> str:
    return machine.path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("/")[2]


def status_of(machine: Machine, pid: int, name: str) -> list[str]:
    lines = machine.path(f"/proc/{pid}/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith(f"{name}:")]
    return found.split()[1:]


def test_a_loader_runs_as_its_own_user_in_its_own_unit(agents: Machine, rank: Rank) -> None:
    rank.gate("loading")
    rank.begin()
    loader = rank.reached("loading")
    agent = rank.status().pid
    unit = unit_of(agents, loader)
    assert unit.startswith("weightcache-loader@")
    assert unit_of(agents, agent) == rank.service
    uids = [agents.run("id", "--user", user).stdout.strip() for user in ("weightcache-loader", "weightcache")]
    assert [status_of(agents, pid, "Uid")[0] for pid in (loader, agent)] == uids
    assert status_of(agents, loader, "NoNewPrivs") == ["1"]
    assert agents.main_pid(unit) == int(status_of(agents, loader, "PPid")[0])
    rank.open("loading")
    rank.await_active()
    rank.no_loader()
    assert "loader: test loader starts --model-path m" in rank.text()


@pytest.mark.parametrize("point", ["started", "staged"])
@pytest.mark.parametrize("victim", ["loader", "supervisor"])
def test_a_killed_loader_leaves_nothing_and_the_next_one_succeeds(
    agents: Machine, rank: Rank, victim: str, point: str
) -> None:
    rank.gate(point)
    rank.begin()
    loader = rank.reached(point)
    assert len(arenas(agents)) == (len(ARENAS) if point == "staged" else 0)
    unit = unit_of(agents, loader)
    agents.kill(loader if victim == "loader" else agents.main_pid(unit))
    eventually(lambda: rank.restarts == 1)
    nothing_is_left(rank)
    assert not rank.alive(loader)
    error = rank.status().error
    assert error is not None
    how = {"loader": "ended with signal 9 (SIGKILL)", "supervisor": "ended without a word (killed for memory, "}
    assert error.message.startswith(f"the loader {how[victim]}")
    if point == "staged":
        assert error.message.endswith(": test loader starts --model-path m")
    rank.open_all()
    with Client(rank) as client:
        client.unharmed()
    assert rank.count("load-began", "set-published") == (2, 1)


FAILURES: dict[str, tuple[type[WeightcacheError], str]] = {
    "exit": (LoadFailed, "ended with status 3: .*cannot find the weights$"),
    "abort": (CheckpointError, "^the checkpoint /models/none is missing$"),
    "bad-token": (LoadFailed, "ended with status 1: .*this token belongs to no load"),
    "unsealed": (WeightcacheError, "arena 1 is no sealed memory file"),
    "wrong-count": (WeightcacheError, "a commit of 2 sets where 1 were published"),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_a_load_that_fails_is_explained_to_who_asked(rank: Rank, mode: str) -> None:
    rank.write(configuration({"WCTEST_MODE": mode}))
    kind, text = FAILURES[mode]
    with pytest.raises(kind, match=text), rank.attach():
        pass
    eventually(lambda: rank.restarts == 1)
    nothing_is_left(rank)
    assert rank.count("load-began", "set-published") == (1, 0)


@pytest.mark.parametrize("mode", ["flood", "leave-child", ""])
def test_a_load_that_succeeds_leaves_its_set_and_nothing_else(rank: Rank, mode: str) -> None:
    rank.write(configuration({"WCTEST_MODE": mode}))
    rank.ready()
    rank.no_loader()
    assert rank.stored == ONE_SET
    assert len(arenas(rank.machine)) == len(ARENAS)
    if mode == "flood":
        assert "loader: line 4999 " in rank.text()


def test_a_loader_that_ignores_sigterm_is_killed(agents: Machine, rank: Rank) -> None:
    rank.write(configuration({"WCTEST_MODE": "deaf"}, loader="timeout_seconds = 1"))
    with pytest.raises(LoadFailed, match="took longer than 1 s"), rank.attach():
        pass
    nothing_is_left(rank)


@pytest.mark.parametrize("point", ["started", "staged"])
def test_a_loader_ends_with_the_agent_that_asked_for_it(agents: Machine, rank: Rank, point: str) -> None:
    rank.gate(point)
    rank.begin()
    first = rank.reached(point)
    rank.kill()
    second = rank.reached(point)
    eventually(lambda: not rank.alive(first))
    agents.systemctl("stop", rank.service)
    rank.no_loader()
    assert not rank.alive(second)
    assert not arenas(agents)
    assert rank.stored == 0


def test_nobody_can_load_without_the_loaders_socket(agents: Machine, rank: Rank) -> None:
    rank.ready()
    rank.ask(Evict(None))
    agents.systemctl("stop", "weightcache-loader.socket")
    with pytest.raises(LoadFailed, match="nobody can run the loader"), rank.attach():
        pass
    assert rank.status().state == "failed"
    agents.systemctl("start", "weightcache-loader.socket")
    eventually(lambda: attaches(rank))
    assert rank.count("set-published") == (2,)
    # Whoever starts an agent starts that socket as well.
    agents.systemctl("stop", rank.service, "weightcache-loader.socket")
    with rank.attach() as held:
        assert rank.ids() == [held.message.set_id]


def attaches(rank: Rank) -> bool:
    """Whether the back-off is over."""
    try:
        with rank.attach():
            return True
    except LoadFailed:
        return False
