"""The subscription: the status at every change, what happened, and no harm from watchers that are slow or gone."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time

import pytest

from tests.support.test_loader import fingerprint
from tests.unit.server.harness import Agent, eventually
from weightcache import protocol, records
from weightcache.client import Conversation
from weightcache.errors import Mismatch, ProtocolError
from weightcache.fingerprint import Fingerprint, diff
from weightcache.protocol import Attach, Observed, Watch
from weightcache.server import watch
from weightcache.server.journal import event
from weightcache.server.peers import Peer
from weightcache.server.refusals import Refusals
from weightcache.server.watch import History


def observed(conversation: Conversation, seconds: float = 15.0) -> Observed:
    message, _ = conversation.receive(seconds)
    assert isinstance(message, Observed)
    return message


def subscribe(agent: Agent, seconds: float = 0.0) -> Conversation:
    conversation = Conversation(agent.paths.status)
    conversation.send(Watch(seconds))
    return conversation


@pytest.fixture
def running(agent: Agent) -> Agent:
    agent.configure()
    return agent.start()


def test_every_change_is_seen_in_order(running: Agent) -> None:
    with subscribe(running) as watching:
        first = observed(watching)
        assert first.status.state == "empty"
        assert [item.event for item in first.events] == ["state-changed"]
        running.gate("loading")
        with running.public() as asking:
            asking.send(protocol.Load(20.0))
            running.reached("loading")
            seen = [first]
            while seen[-1].status.progress is None or not seen[-1].status.progress.bytes_done:
                seen.append(observed(watching))
            running.open("loading")
            while seen[-1].status.state != "ready":
                seen.append(observed(watching))
        happened = [item for one in seen for item in one.events]
        assert [item.serial for item in happened] == list(range(1, len(happened) + 1))
        names = [item.event for item in happened]
        assert names[:3] == ["state-changed", "load-began", "state-changed"]
        assert "set-published" in names
        published = next(item for item in happened if item.event == "set-published")
        assert "131072 bytes in 2 arenas" in published.text
        assert abs(published.at - time.time()) < 60
        with running.attach() as held:
            while not (last := observed(watching)).status.sets[0].leases:
                continue
            assert last.status.sets[0].leases[0].lease == held.message.lease


def test_refusals_are_counted_by_their_code(running: Agent) -> None:
    running.load()
    for _ in range(2):
        with pytest.raises(Mismatch):
            running.attach(fingerprint(dtype="another"))
    with pytest.raises(ProtocolError), running.public() as asking:
        asking.request(protocol.Status(), protocol.RankReport)
    counts = running.status().counts
    assert counts["refused:mismatch"] == 2
    assert counts["refused:protocol"] == 1
    assert (counts["load-began"], counts["set-published"]) == (1, 1)
    with subscribe(running) as watching:
        assert [item.event for item in observed(watching).events if "was refused" in item.text] == ["refused"] * 3


def test_a_late_watcher_gets_what_happened_lately(running: Agent) -> None:
    running.load()
    for _ in range(watch.FIRST_EVENTS):
        running.attach().close()
    eventually(lambda: not running.status().sets[0].leases)
    with subscribe(running) as watching:
        events = observed(watching).events
        assert len(events) == watch.FIRST_EVENTS
        assert {item.event for item in events} == {"leased", "lease-ended"}


def test_changes_in_between_come_together(running: Agent) -> None:
    running.load()
    with subscribe(running, 1.0) as watching:
        observed(watching)
        started = time.monotonic()
        for _ in range(10):
            running.attach().close()
        second = observed(watching)
        assert time.monotonic() - started >= 0.9
        assert len(second.events) >= 19


def test_a_quiet_agent_is_heard_of(running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    with subscribe(running) as watching:
        observed(watching)
        started = time.monotonic()
        observed(watching, watch.QUIET_SECONDS + 5)
        assert time.monotonic() - started >= watch.QUIET_SECONDS - 1


def test_a_watcher_that_does_not_read_harms_nobody(running: Agent) -> None:
    running.load()
    with subscribe(running):
        for _ in range(100):
            running.attach().close()
        assert running.status().state == "ready"


def test_a_watcher_that_leaves_is_forgotten(running: Agent) -> None:
    before = running.fds()
    for _ in range(5):
        with subscribe(running) as watching:
            observed(watching)
    running.await_fds(before)


def test_only_events_are_kept_and_not_for_ever() -> None:
    history = History()
    logger = logging.getLogger("weightcache.test-history")
    logger.addHandler(history)
    logger.setLevel(logging.INFO)
    logger.info("no event")
    for number in range(watch.KEPT + 10):
        logger.info("set %s dropped" + "x" * 1000, number, extra=event("set-dropped", set=str(number)))
    assert history.serial == watch.KEPT + 10
    latest = history.since(0)
    assert len(latest) > 100
    assert latest[-1].serial == history.serial
    assert len(latest[-1].text) == watch.LONGEST_TEXT
    assert history.since(history.serial) == ()


@pytest.mark.parametrize("character", ["x", "\0", "\N{SNOWMAN}"])
def test_the_largest_answer_fits_its_part_of_a_packet(character: str) -> None:
    history = History()
    for _ in range(watch.KEPT):
        record = logging.LogRecord("weightcache", logging.WARNING, "", 0, character * 1000, (), None)
        record.event = event("set-dropped", set="s")["event"]
        history.emit(record)
    events = history.since(0)
    assert events[-1].serial == watch.KEPT
    assert watch.RESERVED * 0.9 < len(json.dumps(records.to_plain(events))) <= watch.RESERVED


def test_the_latest_refusals_are_shown_with_their_differences(running: Agent) -> None:
    running.load()
    with subscribe(running) as watching:
        observed(watching)
        with pytest.raises(Mismatch):
            running.attach(fingerprint(dtype="another", environment="x" * 5000))
        while not (last := observed(watching, 5.0)).status.refusals:  # told at once, not with the next change
            continue
    (refusal,) = last.status.refusals
    assert (refusal.pid, refusal.code, refusal.role) == (os.getpid(), "mismatch", "target")
    assert [d.field for d in refusal.differences] == ["dtype", "environment"]
    assert refusal.differences[0].engine == "another"
    assert len(str(refusal.differences[1].engine)) < 200
    assert refusal.differences[0].consequence
    for _ in range(3):  # one engine that asks again is one entry
        with pytest.raises(Mismatch):
            running.attach(fingerprint(dtype="a third"))
    (refusal,) = running.status().refusals
    assert refusal.differences[0].engine == "a third"


def test_refusals_of_every_field_fit_a_packet() -> None:
    refusals = Refusals()
    long = {f.name: "x" * 5000 if f.type == "str" else 7 for f in dataclasses.fields(Fingerprint)}
    error = Mismatch("m" * 5000)
    error.differences = diff(fingerprint(), Fingerprint(**long))
    assert len(error.differences) > 20
    for pid in range(20):
        refusals.note(Peer(pid, 0, 0), Attach("target" * 100, "g", fingerprint(), 0.0), error)
    kept = tuple(refusals)
    assert [entry.pid for entry in kept] == list(range(15, 20))
    assert len(json.dumps(records.to_plain(kept))) < 96 * 1024
