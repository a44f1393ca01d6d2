"""Whatever the store hands back: complete sets of commits that were whole are taken; every descriptor has one owner."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.server import made
from tests.unit.server.made import commit, entries, names, record_text
from weightcache import manifest
from weightcache.memory import memfd
from weightcache.paths import RankPaths
from weightcache.server import adopt
from weightcache.server.adopt import Adoption
from weightcache.server.app import RECORD_SCHEMA, SETTLE_SECONDS, Agent
from weightcache.server.keeper import ProcessOnly
from weightcache.server.sets import Complete
from weightcache.server.settings import Settings
from weightcache.transport import close_all

Entries = list[tuple[str, int]]


@pytest.fixture(scope="module")
def commits() -> Iterator[list[tuple[Complete, ...]]]:
    """Three loads: with two drafts, with one, and with none."""
    found = [commit(1, 2, 1, at=3.0), commit(2, 1, at=1.0), commit(1, at=2.0, version=7)]
    yield found
    for sets in found:
        made.close(*sets)


@pytest.fixture(scope="module")
def everything(commits: list[tuple[Complete, ...]]) -> Iterator[Entries]:
    found = [entry for sets in commits for entry in entries(*sets)]
    yield found
    close_all([fd for name, fd in found if name.endswith(".record")])


def sorted_out(stored: Sequence[tuple[str, int]]) -> Adoption:
    """Sort out copies of ``stored``; whoever gets it owns all descriptors, each once."""
    handed = [(name, os.dup(fd)) for name, fd in stored]
    before = [os.fstat(fd).st_ino for _, fd in handed]
    found = adopt.sort_out(handed)
    used = [fd for adopted in found.sets for fd in (*adopted.complete.fds, adopted.record_fd)]
    assert sorted([*used, *found.fds]) == sorted(fd for _, fd in handed)
    assert [os.fstat(fd).st_ino for _, fd in handed] == before  # all are still open
    kept = names(*(adopted.complete for adopted in found.sets))
    assert set(found.names) == {name for name, _ in stored} - set(kept)
    assert len(found.names) == len(set(found.names))
    assert made.adopted(handed) == set(ids(found))
    for adopted in found.sets:
        by_name = {name: {fd for other, fd in handed if other == name} for name, _ in handed}
        for number, fd in enumerate(adopted.complete.fds):
            assert fd in by_name[f"{adopted.complete.record.id}.{number}"]
        assert adopted.record_fd in by_name[f"{adopted.complete.record.id}.record"]
    close_all([fd for _, fd in handed])
    return found


def ids(found: Adoption) -> list[str]:
    return [adopted.complete.record.id for adopted in found.sets]


def only_memory(complete: Complete, there: set[str]) -> bool:
    """Whether something of a set is there, but not its record."""
    found = there & set(names(complete))
    return bool(found) and f"{complete.record.id}.record" not in found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_exactly_the_complete_sets_of_commits_that_are_not_torn(
    commits: list[tuple[Complete, ...]], everything: Entries, data: st.DataObject
) -> None:
    """Any choice of entries, in any order, some more than once."""
    missing = data.draw(st.lists(st.sampled_from(everything), max_size=3, unique=True))
    evicted = names(*data.draw(st.lists(st.sampled_from([s for sets in commits for s in sets]), max_size=3)))
    chosen = [entry for entry in everything if entry not in missing and entry[0] not in evicted]
    if chosen:
        chosen += data.draw(st.lists(st.sampled_from(chosen), max_size=5))
    chosen = data.draw(st.permutations(chosen))
    found = sorted_out(chosen)
    there = {name for name, _ in chosen}
    torn = [sets for sets in commits if any(only_memory(s, there) for s in sets)]
    complete = [s for sets in commits if sets not in torn for s in sets if set(names(s)) <= there]
    assert set(ids(found)) == {s.record.id for s in complete}
    times = [adopted.complete.record.published_at for adopted in found.sets]
    assert times == sorted(times)
    known = {s.record.id: s.record for sets in commits for s in sets}
    assert all(adopted.complete.record == known[adopted.complete.record.id] for adopted in found.sets)


@pytest.mark.parametrize("at", [1.0, 1e11])
def test_who_uses_adopted_sets_is_waited_for_whatever_the_clock_says(tmp_path: Path, at: float) -> None:
    paths = RankPaths(tmp_path, 0)
    agent = Agent(Settings(0, paths, paths.public), ProcessOnly())
    assert agent.settling == 0
    sets = commit(1, at=at)
    try:
        agent.adopt(sets)
        assert 0 < agent.settling <= SETTLE_SECONDS
        agent.started -= SETTLE_SECONDS
        assert agent.settling == 0
    finally:
        made.close(*sets)


def test_names_are_short(everything: Entries) -> None:
    """sd_pid_notify_with_fds(3): at most 255; all of them share one variable of the environment."""
    assert all(len(name.encode()) <= 40 and ":" not in name for name, _ in everything)
    assert all(len(name) <= 40 for name in names(*commit_of_many()))


def commit_of_many() -> tuple[Complete, ...]:
    [complete] = sets = commit(253)
    made.close(complete)
    return sets


strange = ["", ".", "stored", "agent", "canary.00000000", ".record", "x.record", "record", "é.record", f"{'0' * 12}.1"]


@pytest.mark.parametrize("name", strange)
@pytest.mark.parametrize("kind", ["device", "pipe", "memfd"])
def test_foreign_names(everything: Entries, name: str, kind: str) -> None:
    if kind == "pipe":
        fd, writer = os.pipe()
        os.close(writer)
    else:
        fd = os.open(os.devnull, os.O_RDONLY) if kind == "device" else memfd.sealed("x", b"{}")
    found = sorted_out([(name, fd), *everything])
    assert found.names == (name,)
    assert len(found.sets) == 6
    os.close(fd)


def nothing(_: Complete) -> bytes:
    return b""


def without(field: str) -> Callable[[Complete], bytes]:
    def text(complete: Complete) -> bytes:
        body = json.loads(record_text(complete))
        del body[field]
        return json.dumps(body).encode()

    return text


BAD_RECORDS: dict[str, Callable[[Complete], bytes]] = {
    "empty": nothing,
    "cut": lambda c: record_text(c)[:-1],
    "half": lambda c: record_text(c)[: len(record_text(c)) // 2],
    "no JSON": lambda _: b"\xff\xfe\x00weights",
    "a list": lambda _: b"[]",
    "a number": lambda _: b"1",
    "null": lambda _: b"null",
    "deep": lambda _: b"[" * 100_000,
    "many digits": lambda _: b'{"schema": ' + b"1" * 10_000 + b"}",
    "no object": lambda _: b"{}",
    "a later schema": lambda c: record_text(c, schema=RECORD_SCHEMA + 1),
    "a schema that is no number": lambda c: record_text(c, schema=True),
    "a manifest that engines do not read": lambda c: record_text(c).replace(
        f'"schema": {manifest.SCHEMA}, "role"'.encode(), f'"schema": {manifest.SCHEMA + 1}, "role"'.encode()
    ),
    "without companions": without("companions"),
    "without a description": without("info"),
    "an unknown field": lambda c: record_text(c, more=1),
    "a wrong type": lambda c: record_text(c, version="1"),
    "of another set": lambda c: record_text(c, id="0" * 12),
    "larger than any": lambda c: record_text(c) + b" " * adopt.MAX_RECORD,
}


@pytest.mark.parametrize("why", BAD_RECORDS)
def test_bad_records(commits: list[tuple[Complete, ...]], everything: Entries, why: str) -> None:
    """The set is left out, and every name of it listed; the others of its commit are as good as before."""
    bad = commits[0][1]
    name = f"{bad.record.id}.record"
    fd = memfd.sealed("record", BAD_RECORDS[why](bad))
    found = sorted_out([entry if entry[0] != name else (name, fd) for entry in everything])
    assert set(ids(found)) == {s.record.id for sets in commits for s in sets} - {bad.record.id}
    assert sorted(found.names) == names(bad)
    os.close(fd)


def test_a_companion_that_is_not_there(commits: list[tuple[Complete, ...]], everything: Entries) -> None:
    """It was evicted."""
    gone, *others = commits[0]
    found = sorted_out([entry for entry in everything if entry[0] not in names(gone)])
    assert set(ids(found)) == {s.record.id for sets in (others, *commits[1:]) for s in sets}
    assert found.names == ()


def test_a_companion_that_was_being_evicted(commits: list[tuple[Complete, ...]], everything: Entries) -> None:
    """Its record goes last: what is left of it without one would look like a commit that is torn."""
    gone, *others = commits[0]
    memory, record = names(gone)[:-1], names(gone)[-1]
    found = sorted_out([entry for entry in everything if entry[0] != memory[0]])
    assert set(ids(found)) == {s.record.id for sets in (others, *commits[1:]) for s in sets}
    assert found.names == (*memory[1:], record)


def test_a_companion_that_was_being_stored(commits: list[tuple[Complete, ...]], everything: Entries) -> None:
    """The records of the torn commit go first: without one of them the rest would look as if it had been evicted."""
    torn, *others = commits
    found = sorted_out([entry for entry in everything if entry[0] != f"{torn[1].record.id}.record"])
    assert set(ids(found)) == {s.record.id for sets in others for s in sets}
    records = [f"{torn[number].record.id}.record" for number in (0, 2)]
    assert found.names[:2] == tuple(sorted(records))
    assert sorted((*found.names, f"{torn[1].record.id}.record")) == names(*torn)


def unsealed(data: bytes) -> int:
    fd = memfd.create("unsealed")
    os.write(fd, data)
    return fd


def of_arena(data: bytes) -> Callable[[Complete], tuple[str, int]]:
    return lambda c: (f"{c.record.id}.2", memfd.sealed("arena", data))


BAD_DESCRIPTORS: dict[str, Callable[[Complete], tuple[str, int]]] = {
    "record not sealed": lambda c: (f"{c.record.id}.record", unsealed(record_text(c))),
    "record no memfd": lambda c: (f"{c.record.id}.record", os.open(os.devnull, os.O_RDONLY)),
    "manifest not sealed": lambda c: (f"{c.record.id}.0", unsealed(b"x")),
    "manifest no memfd": lambda c: (f"{c.record.id}.0", os.open(os.devnull, os.O_RDONLY)),
    "arena not sealed": lambda c: (f"{c.record.id}.2", unsealed(bytes(made.ARENA_BYTES))),
    "arena no memfd": lambda c: (f"{c.record.id}.1", os.open(os.devnull, os.O_RDONLY)),
    "arena too small": of_arena(bytes(made.ARENA_BYTES - 1)),
    "arena too large": of_arena(bytes(made.ARENA_BYTES + 1)),
    "arena empty": of_arena(b""),
}


@pytest.mark.parametrize("why", BAD_DESCRIPTORS)
def test_bad_descriptors(commits: list[tuple[Complete, ...]], everything: Entries, why: str) -> None:
    bad = commits[0][1]
    name, fd = BAD_DESCRIPTORS[why](bad)
    found = sorted_out([entry if entry[0] != name else (name, fd) for entry in everything])
    assert set(ids(found)) == {s.record.id for sets in commits for s in sets} - {bad.record.id}
    assert sorted(found.names) == names(bad)
    os.close(fd)


def test_device_memory_is_opaque(commits: list[tuple[Complete, ...]]) -> None:
    """Its descriptors have no size and no seals; the manifest has."""
    [plain] = commits[2]
    device = Complete(dataclasses.replace(plain.record, backend="cuda", gpu="GPU-x"), plain.fds)
    null = os.open(os.devnull, os.O_RDWR)
    stored = entries(device)
    record = stored[-1][1]
    found = sorted_out([(name, null if name.endswith(".1") else fd) for name, fd in stored])
    assert found.sets[0].complete.record == device.record
    found = sorted_out([(name, null if name.endswith(".0") else fd) for name, fd in stored])
    assert not found.sets
    close_all([null, record])


def test_a_set_whose_name_has_another_form(commits: list[tuple[Complete, ...]], everything: Entries) -> None:
    """Only the exact names count."""
    [complete] = commits[2]
    found = sorted_out(
        [(name.replace(f"{complete.record.id}.1", f"{complete.record.id}.01"), fd) for name, fd in everything]
    )
    assert complete.record.id not in ids(found)
    assert f"{complete.record.id}.01" in found.names


def test_nothing_is_nothing() -> None:
    assert sorted_out([]) == Adoption((), (), ())
