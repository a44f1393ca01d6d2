"""The living host as a source: deadlines, ranks that come, and an end without anybody left."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.monitor import made
from tests.unit.monitor.made import Watched, eventually
from weightcache import paths, protocol
from weightcache.config import Config, RankConfig
from weightcache.errors import ConfigError
from weightcache.monitor import live as lives, view
from weightcache.monitor.host import Facts, Host
from weightcache.monitor.live import Live
from weightcache.monitor.site import Site

Open = Callable[..., Live]


@pytest.fixture
def opened(runtime_dir: Path) -> Iterator[Open]:
    """Observe ``runtime_dir``."""
    made_here: list[Live] = []

    def start(
        only: int | None = None, seconds: float = 0.1, host: Host | None = None, site: Site | None = None
    ) -> Live:
        made_here.append(Live(site or made.site(runtime_dir), only, seconds, host))
        return made_here[-1]

    yield start
    for live in made_here:
        live.close()


def configured(directory: Path, *ranks: int) -> Site:
    config = Config(ranks=tuple(RankConfig(rank, "") for rank in ranks), path=directory / "weightcache.toml")
    return made.site(directory, config)


def test_all_ranks_in_order_with_their_events(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir, 3) as third, Watched(runtime_dir, 1) as first:
        third.events = (made.happening(1), made.happening(3))
        first.events = (made.happening(2),)
        found = opened(host=None).first(5)
        assert [rank.status.rank for rank in found.ranks] == [1, 3]
        assert [(event.rank, event.happened.serial) for event in found.events] == [(3, 1), (1, 2), (3, 3)]
        assert (found.driver, found.devices, found.engines, found.problem) == ("", (), (), "")
        assert abs(found.at - time.time()) < 5


def test_one_rank_only(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir, 1), Watched(runtime_dir, 2):
        assert [rank.status.rank for rank in opened(2).first(5).ranks] == [2]
        assert [rank.agent for rank in opened(7).first(5).ranks] == ["down"]


def test_a_silent_agent_delays_the_first_look_and_is_down(
    runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "ANSWER_SECONDS", 2.0)
    with Watched(runtime_dir, 0), Watched(runtime_dir, 1, script=lambda _agent, _connection: None):
        started = time.monotonic()
        found = opened().first(0.4)
        assert 0.3 < time.monotonic() - started < 1
        assert [rank.agent for rank in found.ranks] == ["up", "down"]
        assert found.ranks[1].reason == protocol.ErrorInfo("no-agent", "the agent did not answer within 0.4 s")


def test_agents_that_answer_delay_nothing(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir, 0):
        started = time.monotonic()
        opened(site=configured(runtime_dir, 0, 5)).first(30)
        assert time.monotonic() - started < 1


def test_ranks_that_come_are_found(runtime_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "SEARCH_SECONDS", 0.1)
    live = opened()
    assert live.snapshot().ranks == ()
    with Watched(runtime_dir, 4):
        eventually(lambda: [rank.agent for rank in live.snapshot().ranks] == ["up"])
    eventually(lambda: [rank.agent for rank in live.snapshot().ranks] == ["down"])


def test_changes_are_told(runtime_dir: Path, opened: Open) -> None:
    with Watched(runtime_dir) as agent:
        live = opened()
        live.first(5)
        live.changed.clear()
        agent.say(made.status(state="loading"))
        assert live.changed.wait(2)
        assert live.snapshot().ranks[0].status.state == "loading"


def test_the_pace_is_everybodys(runtime_dir: Path, opened: Open) -> None:
    gathered: list[float] = []

    def gather(_ranks: object) -> Facts:
        gathered.append(time.monotonic())
        return Facts()

    with Watched(runtime_dir) as agent:
        live = opened(seconds=50.0, host=Host(gather, 50.0))
        live.first(5)
        live.pace(0.2)
        eventually(lambda: agent.asked[-1:] == [protocol.Watch(0.2)], 2)
        eventually(lambda: len(gathered) > 3, 2)


def test_a_snapshot_never_waits(runtime_dir: Path, opened: Open) -> None:
    release = threading.Event()

    def hang(_ranks: object) -> Facts:
        release.wait(10)
        return Facts(driver="580")

    with Watched(runtime_dir, script=lambda _agent, _connection: None):
        live = opened(host=Host(hang, 0.1))
        started = time.monotonic()
        for _ in range(20):
            live.snapshot()
        assert time.monotonic() - started < 0.5
        release.set()
        eventually(lambda: live.snapshot().driver == "580")


def test_an_end_waits_for_nobody_who_hangs(runtime_dir: Path) -> None:
    release = threading.Event()
    host = Host(lambda _ranks: Facts(problem=str(release.wait(10))), 0.1)
    live = Live(made.site(runtime_dir), None, 0.1, host)
    live.snapshot()
    started = time.monotonic()
    live.close()
    assert time.monotonic() - started < 2.5
    release.set()


def test_problems_of_the_configuration_come_first(runtime_dir: Path, opened: Open) -> None:
    site = dataclasses.replace(made.site(runtime_dir), problem=ConfigError("line 3 is wrong"))
    live = opened(site=site, host=Host(lambda _ranks: Facts(problem="no driver"), 0.1))
    assert live.first(2).problem == "line 3 is wrong"
    assert opened(host=Host(lambda _ranks: Facts(problem="no driver"), 0.1)).first(2).problem == "no driver"


def test_facts_are_about_the_ranks_that_were_heard(runtime_dir: Path, opened: Open) -> None:
    asked: list[list[int]] = []

    def gather(ranks: object) -> Facts:
        asked.append([rank.status.rank for rank in ranks])  # type: ignore[attr-defined]
        return Facts("580", "", (made.device(),), (made.engine(),))

    with Watched(runtime_dir, 0), Watched(runtime_dir, 2):
        found = opened(host=Host(gather, 0.05)).first(5)
    assert asked[0] == [0, 2]
    assert (found.driver, found.devices[0].uuid, found.engines[0].pid) == ("580", made.GPU, 4711)


def test_a_host_that_nobody_asks_gathers_nothing(runtime_dir: Path) -> None:
    gathered: list[object] = []
    host = Host(lambda ranks: gathered.append(ranks) or Facts(), 0.01)
    time.sleep(0.1)
    host.close()
    assert gathered == []
    assert paths.RankPaths(runtime_dir, 0).status.name == "0.status.sock"


def test_a_host_survives_what_it_meets() -> None:
    broken = threading.Event()
    broken.set()

    def gather(_ranks: object) -> Facts:
        if broken.is_set():
            raise RuntimeError("broken")
        return Facts(driver="580")

    host = Host(gather, 0.01)
    why = "devices and processes could not be looked at (RuntimeError: broken)"
    eventually(lambda: host.now(()) == Facts(problem=why))
    broken.clear()
    eventually(lambda: host.now(()) == Facts(driver="580"))
    host.close()
