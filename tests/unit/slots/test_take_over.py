"""Two real launchers and their engines: whatever is killed, the other one answers, and there are never two."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.unit.launch.support import alive, eventually
from tests.unit.slots.support import OTHER, Slots, clients, request, watching
from weightcache.standby import fence, roster

KILLS = ("main", "rank", "launcher", "everything", "main")
CLIENTS = 3


def test_whatever_is_killed_of_the_active_one_no_connection_is_refused(slots: Slots) -> None:
    slots.start("a", "b")
    slots.stand()
    events = []
    with clients(slots.address, CLIENTS) as answers, watching(slots):
        for what in KILLS:
            active = slots.stand()
            served = len(answers)
            assert eventually(lambda served=served: len(answers) > served + 10)
            events.append(time.time())
            slots.kill(active, what)
            slots.until(OTHER[active], "active")
            if active not in slots.launchers:
                slots.start(active)  # as a service manager does
        active = slots.stand()
    found = slots.status(active)
    assert found is not None
    assert roster.read(slots.paths.roster(active)).processes == found.ranks
    assert not fence.living(roster.read(slots.paths.roster(OTHER[active])).processes)
    assert not [answer for answer in answers if answer.who is None]
    failed = [answer for answer in answers if not answer.who]
    assert len(failed) <= CLIENTS * len(KILLS)
    assert len({answer.who for answer in answers if answer.who}) == len(KILLS) + 1
    slots.check_never_two()
    slots.check_promotions(events)
    assert all(len(times) == len(KILLS) + 1 for times in slots.owned().values()), slots.owned()


def test_a_rank_that_outlives_its_main_process_is_waited_for(slots: Slots) -> None:
    """It could write KV memory still: the lock is free, and the fence is not complete."""
    (slots.journal / "linger-a").touch()
    slots.start("a")
    ranks = slots.until("a", "active").ranks
    slots.start("b")
    slots.until("b", "standby")
    slots.kill("a", "launcher")
    assert eventually(lambda: len(list(slots.journal.glob("lingers-*"))) == len(ranks))
    slots.until("b", "promoting")
    asked: list[str | None] = []
    thread = threading.Thread(target=lambda: asked.append(request(slots.address).who))
    thread.start()
    os.kill(ranks[0].pid, signal.SIGKILL)
    thread.join(0.5)  # time enough, if anything were to happen
    assert not asked
    assert slots.role("b") == "promoting"
    assert alive(ranks[1].pid)
    os.kill(ranks[1].pid, signal.SIGKILL)
    promotion = slots.until("b", "active").promotions[-1]
    thread.join(10)
    assert asked[0]
    assert asked[0].startswith("b ")
    assert promotion.cause == "death"
    assert promotion.phases["fence"] >= 0.5
    slots.check_never_two()


def test_both_dead_and_one_back(slots: Slots) -> None:
    slots.start("a", "b")
    active = slots.stand()
    slots.kill(OTHER[active], "everything")
    slots.kill(active, "everything")
    waiting = threading.Thread(target=lambda: answers.append(request(slots.address)))
    answers: list = []
    waiting.start()
    slots.start(OTHER[active])
    slots.until(OTHER[active], "active")
    waiting.join(10)
    assert answers[0].who
    assert answers[0].who.startswith(OTHER[active])
    slots.check_never_two()


def test_a_standby_that_died_is_started_again_and_is_no_loss(slots: Slots) -> None:
    slots.start("a", "b")
    active = slots.stand()
    before = slots.status(OTHER[active])
    assert before is not None
    with clients(slots.address, 1) as answers:
        slots.kill(OTHER[active], "main")
        assert eventually(lambda: (slots.status(OTHER[active]) or before).restarts == 1)
        slots.stand()
    assert all(answer.who for answer in answers)
    slots.kill(OTHER[active], "main")
    slots.kill(active, "main")
    answer = request(slots.address)
    assert answer.who
    slots.check_never_two()


@pytest.mark.parametrize("hung", ["Rank", "Main"])
def test_a_hung_active_one_is_replaced(slots: Slots, hung: str) -> None:
    slots.configure(hang_seconds=0.7)
    slots.start("a")
    slots.until("a", "active")
    slots.start("b")
    slots.until("b", "standby")
    with clients(slots.address, 2) as answers:
        (slots.journal / f"hang-a-{hung}").touch()
        slots.until("b", "active")
        (slots.journal / f"hang-a-{hung}").unlink()
        slots.until("a", "standby")
    assert any("has said nothing for" in line and line.endswith(": ending the engine") for line in slots.lines("a"))
    assert not [answer for answer in answers if answer.who is None]
    slots.check_never_two()


def test_a_launcher_that_was_stopped_while_it_lost_its_lock_takes_nobody_out_of_a_roster(slots: Slots) -> None:
    """What its engine said is in the queue still: that it accepts. By then the other one does."""
    late = slots.journal / "wrong-a-Accept"
    late.write_text("late")
    slots.start("a")
    assert eventually((slots.journal / "late-a").exists, 20)
    stopped = slots.until("a", "promoting")
    slots.start("b")
    slots.until("b", "standby")
    os.kill(stopped.launcher.pid, signal.SIGSTOP)
    late.unlink()
    assert eventually(lambda: "http" in slots.owned())
    assert request(slots.address).who
    assert stopped.main is not None
    os.kill(stopped.main.pid, signal.SIGKILL)
    ranks = slots.until("b", "active").ranks
    os.kill(stopped.launcher.pid, signal.SIGCONT)
    assert slots.until("a", "standby").restarts == 1
    text = "".join(path.read_text() for path in slots.paths.directory.glob("*.roster"))
    assert all(f'"pid": {rank.pid}' in text for rank in ranks), text
    slots.check_never_two()


def test_a_failed_promotion_ends_the_engine_and_the_other_one_is_promoted(slots: Slots) -> None:
    slots.start("a")
    slots.until("a", "active")
    slots.start("b")
    slots.until("b", "standby")
    (slots.journal / "wrong-b-Own").write_text("no memory is left")
    slots.kill("a", "main")
    assert eventually(lambda: (slots.status("b") or slots.until("b", "standby")).restarts >= 1)
    assert "rank 0: no memory is left: ending the engine" in slots.lines("b") or (
        "rank 1: no memory is left: ending the engine" in slots.lines("b")
    )
    slots.until("a", "active")
    assert (request(slots.address).who or "").startswith("a ")
    slots.check_never_two()


def test_an_engine_dies_with_its_launcher(slots: Slots) -> None:
    slots.start("a")
    found = slots.until("a", "active")
    assert found.main is not None
    slots.kill("a", "launcher")
    assert eventually(lambda: not any(alive(one.pid) for one in (found.main, *found.ranks) if one))
    assert slots.role("a") == "down"
