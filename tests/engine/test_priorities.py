"""Two real engines of different priority on one device, under load: whose memory it is, and what their clients see."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.slots import START_SECONDS, Asking, RealSlots, asking
from tests.unit.launch.support import eventually
from weightcache.standby.locks import is_taken

pytestmark = pytest.mark.timeout(900)

DRAIN_SECONDS = 4.0
SECONDS = 60.0
LOOK_SECONDS = 0.05
"""Two looks at one lock that are further apart say nothing about the time between them."""


@pytest.fixture
def two(tmp_path: Path, runtime_dir: Path, tiny_model: Path) -> Iterator[tuple[RealSlots, RealSlots]]:
    """The engine that waits, ``batch``, and the one that comes first, ``chat``."""
    with contextlib.ExitStack() as stack:
        made = []
        for name, priority in (("batch", 0), ("chat", 10)):
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
            (tmp_path / name).mkdir()
            engine = RealSlots(tmp_path / name, runtime_dir, port, name=name, priority=priority, model=tiny_model)
            engine.configure(drain_seconds=DRAIN_SECONDS)
            stack.callback(engine.close)
            made.append(engine)
        yield made[0], made[1]


@dataclass
class Owners:
    """Looks again and again at the bytes that stand for KV memory: whose they are, one after the other."""

    engines: tuple[RealSlots, RealSlots]
    seen: list[str] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        one, other = self.engines
        while not self.stop.wait(0.005):
            began = time.monotonic()
            first, second = _owns(one), _owns(other)
            if first and second:
                # The first one was there before and after the second one was seen.
                if _owns(one) and time.monotonic() - began < LOOK_SECONDS:
                    self.both.append(began)
            elif first or second:
                owner = one.name if first else other.name
                if self.seen[-1:] != [owner]:
                    self.seen.append(owner)


def _owns(engine: RealSlots) -> bool:
    return is_taken(engine.paths.lock, 1)


@contextlib.contextmanager
def watching(one: RealSlots, other: RealSlots) -> Iterator[list[str]]:
    """Inside, it is watched that never both own memory; who did is in the list, in order."""
    owners = Owners((one, other))
    thread = threading.Thread(target=owners.run)
    thread.start()
    try:
        yield owners.seen
    finally:
        owners.stop.set()
        thread.join(10)
    assert owners.both == []


class Request:
    """One request for so many tokens, from a thread; it is connected when this returns."""

    def __init__(self, engine: RealSlots, tokens: int) -> None:
        self.began, self.ended, self.status = time.monotonic(), 0.0, 0
        self.headers: dict[str, str] = {}
        self.answer: dict[str, Any] = {}
        self._connection = http.client.HTTPConnection(*engine.address, timeout=SECONDS)
        self._connection.connect()
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"text": "Once upon a time", "sampling_params": sampling})
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with contextlib.closing(self._connection) as connection:
            response = connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            self.answer, self.status = json.loads(response.read()), response.status
        self.ended = time.monotonic()

    def result(self) -> int:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.status


def answers_after(client: Asking, moment: float, count: int = 1) -> None:
    """Wait until so many requests are answered that began after that."""
    found: Callable[[], int] = lambda: sum(began > moment for began, _ in client.answered)  # noqa: E731
    assert eventually(lambda: found() >= count, SECONDS), (client.answered[-3:], client.failed)


def first_answer(client: Asking, moment: float) -> tuple[float, float]:
    """When the first answer after that was there, and its request begun. It is waited for."""
    assert eventually(lambda: client.answered[-1][1] > moment, SECONDS), (client.answered[-3:], client.failed)
    return next(times for times in client.answered if times[1] > moment)


def test_the_more_important_one_comes_leaves_and_dies_under_load(
    two: tuple[RealSlots, RealSlots], record_property: Callable[[str, object], None]
) -> None:
    batch, chat = two
    took: dict[str, list[float]] = {"wake": [], "park": [], "death": []}

    def wake(chats: Asking) -> float:
        """When ``chat`` was woken; it has answered whoever waited since then, and ``batch`` is parked."""
        woken = time.monotonic()
        assert chat.ask("a", "wake").ok
        began, ended = first_answer(chats, woken)
        assert began < woken
        took["wake"].append(ended - woken)
        chat.until("a", "active", SECONDS)
        batch.until("a", "parked", SECONDS)
        return woken

    def taken_over(moment: float, why: str) -> None:
        """``batch`` has answered whoever had waited when ``chat`` went at that moment."""
        began, ended = first_answer(batches, moment)
        assert began < moment
        took[why].append(ended - moment)
        batch.until("a", "active", SECONDS)

    batch.start("a")
    main = batch.until("a", "active", START_SECONDS).main
    with watching(batch, chat) as owners, asking(batch, START_SECONDS) as batches:
        answers_after(batches, 0.0)
        chat.start("a")
        chat.until("a", "active", START_SECONDS)
        parked = batch.until("a", "parked", SECONDS)
        assert parked.problem == "chat is more important, and has the same GPU"
        with asking(chat, START_SECONDS) as chats:
            answers_after(chats, 0.0)
            for round_ in ("long", "short"):
                left = time.monotonic()
                assert chat.ask("a", "park").ok
                taken_over(left, "park")
                assert chat.until("a", "parked", SECONDS).problem == ""
                answers_after(batches, left, 3)
                if round_ == "long":
                    probe = Request(batch, 50)
                    assert probe.result() == 200
                    tokens = max(30, int(30 / (probe.ended - probe.began)))  # in 0.6 s, or a little more
                    long, short = Request(batch, 3000), Request(batch, tokens)
                    # Whoever connected before is accepted before.
                    answers_after(batches, short.began)
                    woken = wake(chats)
                    assert short.result() == 200
                    assert short.ended > woken
                    assert short.answer["meta_info"]["completion_tokens"] == tokens
                    assert long.result() == 503
                    assert long.headers["retry-after"] == "1"
                    assert long.ended - woken >= DRAIN_SECONDS
                    promotion = chat.until("a", "active").promotions[-1]
                    assert promotion.cause == "wake"
                    assert DRAIN_SECONDS <= promotion.phases["clear"] <= took["wake"].pop()
                else:
                    wake(chats)
            # An engine that crashes is started again, and nothing of it touches the other one.
            killed = time.monotonic()
            chat.kill("a", "main")
            taken_over(killed, "death")
            chat.until("a", "active", START_SECONDS)
            batch.until("a", "parked", SECONDS)
            answers_after(chats, killed)
        killed = time.monotonic()
        chat.kill("a", "everything")
        taken_over(killed, "death")
        assert chat.role("a") == "down"
        answers_after(batches, killed)
    assert owners == ["batch", "chat"] * 4 + ["batch"]
    assert (batches.failed, batches.refused) == ([], [])
    assert len(chats.failed) <= 1
    assert chats.refused == []
    found = batch.until("a", "active")
    assert (found.main, found.restarts) == (main, 0)
    record_property("seconds", took)
    print(*batch.lines("a"), "", *chat.lines("a"), took, sep="\n")
    assert statistics.median(took["park"] + took["wake"]) < 2.0, took
    assert min(took["death"]) < 3.0, took
