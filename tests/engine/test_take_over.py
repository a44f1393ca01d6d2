"""Two real engines under two real launchers: what is killed of the active one, and who answers how soon."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.slots import START_SECONDS, RealSlots, asking
from tests.unit.launch.support import eventually
from tests.unit.slots.support import OTHER, watching

pytestmark = pytest.mark.timeout(900)

KILLS = ("main", "rank", "launcher", "everything", "main")


@pytest.fixture
def slots(tmp_path: Path, runtime_dir: Path, tiny_model: Path) -> Iterator[RealSlots]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as port:
        made = RealSlots(tmp_path, runtime_dir, port, model=tiny_model)
        yield made
        made.close()


def test_kills_hand_over_and_a_stop_under_load(slots: RealSlots, record_property) -> None:
    slots.start("a")
    slots.until("a", "active", START_SECONDS)
    slots.start("b")
    assert slots.stand(START_SECONDS) == "a"
    with asking(slots) as client, watching(slots):
        took, events = [], []
        for what in KILLS:
            active = slots.stand(START_SECONDS)
            assert eventually(lambda: bool(client.answered), 60)
            killed = time.monotonic()
            events.append(time.time())
            slots.kill(active, what)
            assert eventually(lambda killed=killed: client.answered[-1][0] > killed, 60), slots.say()
            took.append(next(ended for began, ended in client.answered if began > killed) - killed)
            assert slots.role(OTHER[active]) == "active"
            if active not in slots.launchers:
                slots.start(active)
        assert len(client.failed) <= len(KILLS)
        active = slots.stand(START_SECONDS)
        before = len(client.failed)
        events.append(time.time())
        assert slots.ask(active, "retire").ok
        slots.until(OTHER[active], "active", 60)
        slots.until(active, "standby", 60)
        events.append(time.time())
        slots.launchers[OTHER[active]].terminate()
        slots.until(active, "active", 60)
        assert slots.launchers.pop(OTHER[active]).wait(60) == 0
        assert client.failed[before:] == []
    assert client.refused == []
    slots.check_promotions(events)
    record_property("seconds", took)
    print(slots.say(), took)
    assert sorted(took)[len(took) // 2] < 2.0, took
