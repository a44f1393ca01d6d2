"""Two real engines under two real launchers: what is killed of the active one, and who answers how soon."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engine import support
from tests.support.engine import CPU_ARGUMENTS
from tests.support.environments import engine_variables
from tests.unit.launch.support import alive, eventually
from tests.unit.slots.support import OTHER, Slots, watching

pytestmark = pytest.mark.timeout(900)

START_SECONDS = 240.0
KILLS = ("main", "rank", "launcher", "everything", "main")


@dataclass
class RealSlots(Slots):
    """The engine ``demo``, with SGLang."""

    model: Path = Path()
    hang_seconds: float = 60.0

    def arguments(self) -> list[str]:
        return ["--model-path", str(self.model), *CPU_ARGUMENTS, *support.ARGUMENTS]

    def environment(self) -> dict[str, str]:
        return {**engine_variables(), **support.VARIABLES}

    def say(self) -> str:
        """What the launchers said: SGLang's own log is long."""
        return "\n".join(f"{slot}: {self.role(slot)}: {self.lines(slot)}" for slot in self.launchers)

    def close(self) -> None:
        found = [status for slot in "ab" if (status := self.status(slot)) is not None]
        super().close()
        pids = [one.pid for status in found for one in (status.main, *status.ranks) if one is not None]
        assert eventually(lambda: not any(alive(pid) for pid in pids), 60)


@dataclass
class Asking:
    """A client that asks for a few tokens again and again, on a new connection each time."""

    address: tuple[str, int]
    answered: list[tuple[float, float]] = field(default_factory=list)
    """When the connection was begun, and when the answer was there."""
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = json.dumps({"text": "Once", "sampling_params": {"max_new_tokens": 2, "temperature": 0}})
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                sock = socket.create_connection(self.address, 60)
            except OSError as error:
                self.refused.append(str(error))
                continue
            connection = http.client.HTTPConnection(*self.address, timeout=60)
            connection.sock = sock
            try:
                with contextlib.closing(connection):
                    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    text = response.read()
                    assert response.status == 200, (response.status, text)
                self.answered.append((began, time.monotonic()))
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failed.append((began, time.monotonic(), repr(error)))


@contextlib.contextmanager
def asking(slots: Slots) -> Iterator[Asking]:
    client = Asking(slots.address)
    thread = threading.Thread(target=client.run)
    thread.start()
    try:
        yield client
    finally:
        client.stop.set()
        thread.join(90)


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
