"""The real agent through everything that an operator does with its units, and through a broken configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.test_loader import ARENAS
from tests.systemd.machine import Machine
from tests.systemd.rank import (
    CONFIG,
    ONE_SET,
    RUN,
    TARGET,
    Client,
    Rank,
    arenas,
    configuration,
    eventually,
    reset,
)
from tests.unit.server.harness import contents
from weightcache.errors import ConfigError

RESTARTS: dict[str, Callable[[Rank], object]] = {
    "systemctl kill": lambda rank: rank.machine.systemctl("kill", rank.service),
    "restart": lambda rank: rank.machine.systemctl("restart", rank.service),
    "restart of the socket": lambda rank: rank.machine.systemctl("restart", rank.socket),
    "restart of the target": lambda rank: rank.machine.systemctl("restart", TARGET),
}
BROKEN = configuration(more='[policy]\nverify_adoptet = "background"\n')


def states(rank: Rank, *units: str) -> list[str]:
    return [rank.machine.show(unit, "ActiveState")["ActiveState"] for unit in units]


def risen(rank: Rank, restarts: int) -> bool:
    return rank.show("NRestarts", "ActiveState") == {"NRestarts": str(restarts), "ActiveState": "active"}


@pytest.mark.parametrize("how", RESTARTS)
def test_a_restart_keeps_the_weights(rank: Rank, how: str) -> None:
    before = rank.ready()
    inodes = arenas(rank.machine)
    with Client(rank) as client:
        RESTARTS[how](rank)
        after = rank.successor(before.pid)
        assert [resident.id for resident in after.sets] == [client.set_id]
        assert rank.stored == ONE_SET
        assert arenas(rank.machine) == inodes
        eventually(client.leased)
        client.unharmed()
    assert rank.count("load-began", "set-adopted") == (1, 1)


def test_stop_frees_the_weights_and_only_an_attach_starts_the_rank_again(rank: Rank) -> None:
    rank.ready()
    assert len(arenas(rank.machine)) == len(ARENAS)
    with Client(rank) as client:
        rank.machine.systemctl("stop", rank.service)
        assert rank.stored == 0
        assert not rank.paths.status.exists()
        for _ in range(5):  # and the client tries to renew its lease
            told = rank.machine.run("wcache", "status", "--rank", "0", check=False)
            assert (told.returncode, told.stderr) == (69, f"wcache: no agent answers in {RUN}\n")
        assert states(rank, rank.service, rank.socket) == ["inactive", "active"]
        assert rank.count("load-began") == (1,)
        eventually(lambda: not arenas(rank.machine, besides=client.pid))
        client.unharmed()
        with Client(rank) as later:
            assert later.set_id != client.set_id
            later.unharmed()
            eventually(lambda: [lease.pid for lease in rank.status().orphans] == [client.pid])
    assert rank.count("load-began", "set-adopted") == (2, 0)


def test_stopping_the_target_is_off(rank: Rank) -> None:
    rank.ready()
    units = (rank.service, rank.socket, "weightcache-loader.socket")
    rank.machine.systemctl("stop", TARGET)
    assert states(rank, *units) == ["inactive"] * 3
    assert rank.stored == 0
    assert not arenas(rank.machine)
    left = rank.machine.run("sh", "-c", f"ls {RUN}/*.sock", check=False).stdout
    assert left == ""
    rank.machine.systemctl("start", TARGET)
    assert states(rank, *units) == ["inactive", "active", "active"]
    with Client(rank) as client:
        client.unharmed()


def test_killed_as_soon_as_it_is_ready(agents: Machine, rank: Rank) -> None:
    times = 30 if agents.version == "252" else 5
    [kept] = rank.ready().sets
    since = agents.show(rank.socket, "ActiveEnterTimestampMonotonic")
    with Client(rank) as client, agents.drop_in(rank.service, "[Service]\nRestartSec=10ms\n"):
        for number in range(times):
            rank.kill()
            eventually(partial(risen, rank, number + 1))
        assert rank.ids() == [kept.id]
        assert rank.stored == ONE_SET
        client.unharmed()
        eventually(client.leased)
    assert agents.show(rank.socket, "ActiveEnterTimestampMonotonic") == since
    assert rank.count("load-began", "set-adopted") == (1, times)
    rank.no_loader()


def test_nothing_is_loaded_at_boot_but_what_is_to_be_warm(boot: Callable[..., Machine], trusting: None) -> None:
    units = ["weightcache@0.socket", "weightcache@1.socket", "weightcache-warm@1.service"]
    machine = boot(enable=units, files={CONFIG: configuration()})
    cold, warm = Rank(machine, 0), Rank(machine, 1)
    warm.await_active()
    assert [resident.role for resident in warm.status().sets] == ["target"]
    assert states(cold, cold.service, cold.socket) == ["inactive", "active"]


# A broken configuration


def test_a_rank_that_holds_weights_serves_them_whatever_the_configuration_says(rank: Rank) -> None:
    [kept] = rank.ready().sets
    rank.write(BROKEN)
    rank.machine.systemctl("restart", rank.service)
    told = f"{CONFIG}: policy.verify_adoptet"
    assert told in rank.status_text
    status = rank.status()
    assert (status.state, status.kept, status.error and status.error.code) == ("ready", "store", "config")
    rank.killed()
    with Client(rank) as client:
        assert client.set_id == kept.id
        client.unharmed()
        eventually(lambda: "1 engine" in rank.status_text)
        assert told in rank.status_text
        rank.write(configuration())
        rank.machine.systemctl("restart", rank.service)
        assert rank.ids() == [kept.id]
        assert rank.status().error is None
        eventually(lambda: "1 engine" in rank.status_text)
        assert CONFIG not in rank.status_text
    assert rank.count("load-began") == (1,)


def test_a_first_start_with_a_broken_configuration_fails_once(rank: Rank) -> None:
    rank.write(BROKEN)
    done = rank.machine.run("systemctl", "start", rank.service, check=False)
    assert done.returncode == 1
    rank.await_active()
    told = f"{CONFIG}: policy.verify_adoptet"
    assert any(told in str(entry["MESSAGE"]) for entry in rank.entries())
    for _ in range(3):
        assert rank.status_text.startswith(f"failed: {told}")
        with pytest.raises(ConfigError, match=r"verify_adoptet.*verify_adopted"), rank.attach():
            pass
    assert rank.restarts == 1
    assert rank.count("load-began") == (0,)
    # The same for whoever repairs it: the next start means it.
    rank.write(configuration())
    rank.machine.systemctl("restart", rank.service)
    with rank.attach() as held:
        assert [len(part) for part in contents(held)] == list(ARENAS)


def test_a_client_that_starts_a_rank_with_a_broken_configuration_is_told(agents: Machine, rank: Rank) -> None:
    rank.write(BROKEN)
    for _ in range(3):
        with pytest.raises(ConfigError, match="verify_adoptet"), rank.attach():
            pass
    rank.await_active()
    assert states(rank, rank.socket) == ["active"]
    assert rank.restarts <= 1
    reset(agents, configuration())
    with rank.attach() as held:
        assert held.message.set_id == rank.ids()[0]
