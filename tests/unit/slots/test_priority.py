"""Two engines of different priority on one device: who has its memory, and how soon it changes hands."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.launch.support import eventually
from tests.unit.slots.support import Slots, clients, request
from weightcache import transport
from weightcache.launch import director
from weightcache.standby.status import SlotStatus


@pytest.fixture
def low(slots: Slots) -> Slots:
    return slots


@pytest.fixture
def high(tmp_path: Path, runtime_dir: Path) -> Iterator[Slots]:
    (tmp_path / "high").mkdir()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as port:
        made = Slots(tmp_path / "high", runtime_dir, port, name="high", priority=5)
        yield made
        made.close()


def memory(engine: Slots) -> list[tuple[float, float, str]]:
    """Since when and until when which rank of the engine owned memory."""
    return [times for kind, owned in engine.owned().items() if kind.startswith("memory") for times in owned]


def never_both(one: Slots, other: Slots) -> None:
    assert memory(one)
    assert memory(other)
    for (since, until, who), (since_, until_, whom) in itertools.product(memory(one), memory(other)):
        assert until <= since_ or until_ <= since, f"{who} had memory from {since} to {until}, {whom} from {since_}"


def test_the_more_important_engine_has_the_memory_until_it_leaves(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    with clients(low.address, 2) as answers:
        assert eventually(lambda: len(answers) > 5)
        begin = time.monotonic()
        high.start("a")
        high.until("a", "active")
        low.until("a", "parked")
        assert request(high.address).who
        assert any("parked: high is more important, and has the same GPU" in line for line in low.lines("a"))
        parked = low.status("a")
        assert parked is not None
        assert parked.problem == "high is more important, and has the same GPU"
        promoted = high.until("a", "active").promotions[-1]
        assert "clear" in promoted.phases
        assert high.lines("a").count("waiting for the GPU memory of demo") == 1
        served = len(answers)
        high.launchers["a"].send_signal(signal.SIGTERM)
        assert low.until("a", "active").problem == ""
        assert high.launchers.pop("a").wait(20) == -signal.SIGTERM
        assert eventually(lambda: len(answers) > served + 5)
        assert time.monotonic() - begin < 30
    # Whoever came meanwhile waited in the queue.
    assert not [answer for answer in answers if not answer.who]
    never_both(low, high)


BLIND = "nobody can tell whether a more important engine is there"


@contextlib.contextmanager
def without_descriptors(engine: Slots) -> Iterator[None]:
    """The launcher of slot a can open nothing, and has said so."""
    pid = engine.launchers["a"].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        assert eventually(lambda: any(BLIND in line for line in engine.lines("a")))
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert sum(BLIND in line for line in engine.lines("a")) == 1


def test_an_active_engine_goes_on_while_its_launcher_cannot_see_who_else_is_there(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    with without_descriptors(low):
        with clients(low.address, 1) as answers:
            time.sleep(2 * director.LOOK)
            high.start("a")
            high.until("a", "promoting")
            served = len(answers)
            assert eventually(lambda: len(answers) > served + 5)
        assert all(answer.who for answer in answers)
        assert not memory(high)
    low.until("a", "parked")
    high.until("a", "active")
    never_both(low, high)


def test_no_engine_is_promoted_while_its_launcher_cannot_see_who_else_is_there(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    assert low.ask("a", "park").ok
    engine = low.until("a", "parked").main
    high.start("a")
    high.until("a", "active")
    with without_descriptors(low):
        low.paths.parked.unlink()
        time.sleep(2 * director.LOOK)
    time.sleep(2 * director.LOOK)
    assert low.until("a", "parked").main == engine
    high.launchers["a"].send_signal(signal.SIGTERM)
    assert low.until("a", "active").main == engine
    assert high.launchers.pop("a").wait(20) == -signal.SIGTERM
    never_both(low, high)


def said(engine: Slots) -> SlotStatus:
    found = engine.status("a")
    assert found is not None
    return found


@contextlib.contextmanager
def exhausted(engine: Slots, report: Path) -> Iterator[psutil.Process]:
    """Connections have taken every descriptor that the launcher of slot a may have, and more wait."""
    launcher = psutil.Process(engine.launchers["a"].pid)
    before = launcher.rlimit(psutil.RLIMIT_NOFILE)
    open_ = [int(path.name) for path in Path(f"/proc/{launcher.pid}/fd").iterdir()]
    with contextlib.ExitStack() as stack:
        launcher.rlimit(psutil.RLIMIT_NOFILE, (max(open_) + 1, before[1]))
        stack.callback(launcher.rlimit, psutil.RLIMIT_NOFILE, before)
        for _ in range(max(open_) + 1 - len(open_) + 5):
            stack.enter_context(transport.connect(report, time.monotonic() + 5))
        assert eventually(lambda: any("nobody can be let in" in line for line in engine.log("a").splitlines()))
        yield launcher


def test_who_is_parked_because_its_launcher_cannot_look_says_so_and_its_launcher_rests(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    assert low.ask("a", "park").ok
    assert low.until("a", "parked").problem == ""
    [report] = low.runtime.glob("wcache-launch-*/report")
    high.start("a")
    high.until("a", "active")
    with exhausted(low, report) as launcher:
        low.paths.parked.unlink()
        assert eventually(lambda: BLIND in said(low).problem)
        assert said(low).problem.endswith("(Too many open files)")
        used = sum(launcher.cpu_times()[:2])
        time.sleep(2)
        assert sum(launcher.cpu_times()[:2]) - used < 0.5
    assert eventually(lambda: said(low).problem == "high is more important, and has the same GPU")
    assert low.role("a") == "parked"


def test_a_more_important_engine_that_dies_leaves_the_memory_at_once(low: Slots, high: Slots) -> None:
    low.start("a")
    high.start("a")
    high.until("a", "active")
    low.until("a", "parked")
    high.more["FIRST_PAUSE"] = "60"
    found = high.status("a")
    assert found is not None
    os.kill(found.launcher.pid, signal.SIGKILL)
    high.launchers.pop("a").wait(10)
    died = time.monotonic()
    low.until("a", "active")
    assert time.monotonic() - died < 5
    high.start("a")
    high.until("a", "active")
    low.until("a", "parked")
    never_both(low, high)


def test_a_standby_of_the_more_important_engine_takes_over_and_the_other_stays_parked(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    high.start("a", "b")
    active = high.stand()
    low.until("a", "parked")
    high.kill(active, "main")
    high.until({"a": "b", "b": "a"}[active], "active")
    assert request(high.address).who
    assert low.until("a", "parked").promotions[-1].cause == "start"
    never_both(low, high)


def test_who_was_parked_by_somebody_and_is_woken_says_who_is_more_important(low: Slots, high: Slots) -> None:
    low.start("a")
    low.until("a", "active")
    low.ask("a", "park")
    assert low.until("a", "parked").problem == ""
    high.start("a")
    high.until("a", "active")
    low.ask("a", "wake")
    assert eventually(lambda: (found := low.status("a")) is not None and "high is more" in found.problem, 10)
    assert low.role("a") == "parked"


def test_engines_of_one_priority_do_not_look_at_each_other(low: Slots, high: Slots) -> None:
    high.priority = 0
    high.configure()
    low.start("a")
    low.until("a", "active")
    high.start("a")
    high.until("a", "active")
    assert low.role("a") == "active"
    assert request(low.address).who
    assert request(high.address).who
