"""Statuses too large for a packet: the least important goes first, and in the end everything fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.server.harness import Agent
from weightcache import protocol, transport
from weightcache.errors import tree
from weightcache.fingerprint import CONSEQUENCES, Difference, Fingerprint
from weightcache.protocol import (
    DrainInfo,
    ErrorInfo,
    LeaseStatus,
    LoadProgress,
    Measured,
    Observed,
    RankStatus,
    Refusal,
    SetStatus,
)
from weightcache.server import report, watch
from weightcache.server.journal import MESSAGE_IDS
from weightcache.status import ATTACH_BOUNDS

ROOM = transport.MAX_PACKET - watch.RESERVED


def fingerprint(text: str = "x", number: int = 1, **changes: Any) -> Fingerprint:
    kinds = {"int": number, "str": text}
    base = Fingerprint(**{field.name: kinds[str(field.type)] for field in dataclasses.fields(Fingerprint)})
    return dataclasses.replace(base, **changes)


def leases(count: int, text: str = "c" * 200) -> tuple[LeaseStatus, ...]:
    return tuple(LeaseStatus(f"{number:012x}", number, 0, text, text, 1.7e9) for number in range(count))


def weight_set(number: int = 0, **changes: Any) -> SetStatus:
    base = SetStatus(
        id=f"{number:012x}",
        role="target",
        model="/models/small",
        revision="",
        version=number,
        bytes=10**11,
        arenas=3,
        tensors=500,
        fingerprint=fingerprint(),
        digest="0" * 32,
        published_at=1.7e9,
        load_seconds=12.5,
        bytes_read=10**11,
        leases=(),
    )
    made = dataclasses.replace(base, **changes)
    return dataclasses.replace(made, leases_total=len(made.leases))


def refusal(text: str = "v" * 103) -> Refusal:
    differences = tuple(Difference(name, text, text, why) for name, why in CONSEQUENCES.items())
    return Refusal(1.7e9, 1, 0, text, text, "target", "mismatch", text * 5, differences)


def status(**changes: Any) -> RankStatus:
    base = RankStatus(
        rank=0,
        state="ready",
        backend="cuda",
        gpu_uuid="GPU-00000000-1111-2222-3333-444444444444",
        version="0.1.0",
        pid=1,
        uptime_seconds=5.0,
        model="/models/small",
        sets=(),
        orphans=(),
        progress=None,
        error=None,
        drained=None,
    )
    return dataclasses.replace(base, **changes)


def size(found: RankStatus) -> int:
    return len(protocol.encode(Observed(found, ())))


def test_what_fits_is_whole() -> None:
    whole = status(sets=(weight_set(leases=leases(64)),), refusals=(refusal(),))
    assert report.fitting(whole, ROOM) is whole


def test_refusals_go_before_leases() -> None:
    sets = (weight_set(0, leases=leases(64)), weight_set(1, role="draft-0", leases=leases(64)))
    whole = status(sets=sets, refusals=(refusal(),) * 5)
    assert size(whole) > ROOM
    assert report.fitting(whole, ROOM) == dataclasses.replace(whole, refusals=())


def test_the_newest_leases_stay_and_all_are_counted() -> None:
    whole = status(sets=(weight_set(leases=leases(500)),), orphans=leases(500))
    found = report.fitting(whole, ROOM)
    assert [lease.pid for lease in found.sets[0].leases] == list(range(480, 500))
    assert [lease.pid for lease in found.orphans] == list(range(480, 500))
    assert (found.sets[0].leases_total, found.sets[0].unnamed) == (500, 480)
    assert size(found) <= ROOM


def test_descriptions_are_clipped_and_paths_are_not() -> None:
    path = "/m" * 2000
    made = fingerprint(model_path=path, environment="e" * 32_000)
    whole = status(sets=tuple(weight_set(n, model=path, fingerprint=made, leases=leases(2)) for n in range(3)))
    found = report.fitting(whole, ROOM)
    assert size(found) <= ROOM
    for number, entry in enumerate(found.sets):
        assert (entry.model, entry.fingerprint.model_path, entry.leases) == (path, path, leases(2))
        assert entry.fingerprint.environment == "e" * 4093 + "..."
        assert entry.version == number


def test_of_too_much_the_newest_sets_stay() -> None:
    whole = status(sets=tuple(weight_set(n, leases=leases(64, "\0" * 200)) for n in range(64)), orphans=leases(64))
    found = report.fitting(whole, ROOM)
    assert [(entry.version, entry.leases, entry.unnamed) for entry in found.sets] == [
        (n, (), 64) for n in range(59, 64)
    ]
    assert (found.sets[0].digest, found.gpu_uuid, found.orphans) == (whole.sets[0].digest, whole.gpu_uuid, ())


texts = st.builds(
    lambda character, count: character * count,
    st.sampled_from(["x", '"', "\0", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\ud800"]),
    st.sampled_from([0, 1, 40, 41, 200, 4096, 5000, 40_000]),
)
numbers = st.sampled_from([0, -1, 2**63 - 1, 2**63, -(2**80), 10**4000])
floats = st.floats(allow_nan=False, allow_infinity=False)
sets = st.builds(
    SetStatus,
    **dict.fromkeys(("id", "role", "model", "revision", "digest", "suspect"), texts),
    **dict.fromkeys(("version", "bytes", "arenas", "tensors", "bytes_read", "leases_total"), numbers),
    **dict.fromkeys(("published_at", "load_seconds"), floats),
    fingerprint=st.builds(fingerprint, texts, numbers),
    leases=st.builds(leases, st.sampled_from([0, 1, 20, 64]), texts),
)
names = list(MESSAGE_IDS) + [f"{name}:{error.code}" for name in watch.CODED for error in tree()]
statuses = st.builds(
    RankStatus,
    rank=st.just(511),
    state=st.just("degraded"),
    backend=st.just("cuda"),
    gpu_uuid=texts,
    version=texts,
    pid=numbers,
    uptime_seconds=floats,
    model=texts,
    sets=st.lists(sets, max_size=8).map(tuple),
    orphans=st.builds(leases, st.sampled_from([0, 20, 64]), texts),
    progress=st.builds(LoadProgress, texts, numbers, numbers, floats),
    error=st.builds(ErrorInfo, texts, texts),
    drained=st.builds(DrainInfo, numbers, floats),
    counts=st.just(dict.fromkeys(names, 2**53)),
    refusals=st.builds(refusal, texts).map(lambda one: (one,) * 5),
    measured=st.just(Measured(attaches=(2**53,) * (len(ATTACH_BOUNDS) + 1))),
)


@settings(max_examples=60, deadline=None)
@given(statuses)
def test_everything_fits_in_the_end(whole: RankStatus) -> None:
    found = report.fitting(whole, ROOM)
    data = protocol.encode(Observed(found, ()))
    assert len(data) <= ROOM
    assert protocol.decode(data) == Observed(found, ())


@pytest.mark.parametrize("character", ["x", "\0", "\N{GRINNING FACE}"])
def test_the_worst_fits_too(character: str) -> None:
    text, number = character * 4200, 10**4000
    worst = weight_set(
        **dict.fromkeys(("id", "role", "model", "revision", "digest", "suspect"), text),
        **dict.fromkeys(("version", "bytes", "arenas", "tensors", "bytes_read"), number),
        fingerprint=fingerprint(text, -number),
        leases=leases(21, text),
    )
    whole = status(
        **dict.fromkeys(("backend", "gpu_uuid", "version", "model", "kept"), text),
        sets=(worst,) * 6,
        orphans=leases(64, text),
        progress=LoadProgress(text, number, number, 1.0),
        error=ErrorInfo(text, text),
        counts=dict.fromkeys(names, 2**53),
        refusals=(refusal(text),) * 5,
    )
    assert 0 < size(report.fitting(whole, ROOM)) <= ROOM


def test_a_real_agent_counts_its_leases(agent: Agent) -> None:
    agent.start("--load")
    agent.await_state("ready")
    with agent.attach(), agent.attach():
        [entry] = agent.status().sets
        assert (len(entry.leases), entry.leases_total, entry.unnamed) == (2, 2, 0)
