"""Asking an agent for a set: what comes, what may not come, and what is left open (nothing)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.test_loader import fingerprint, make
from tests.unit.engine.fakes import Peer, agent, answering, arenas, directive, offering, open_fds
from weightcache import client, manifest, protocol, transport
from weightcache.engine import ask as asking
from weightcache.engine.ask import Invitation, Offer, ask, socket_of
from weightcache.errors import (
    AgentUnavailable,
    AttachFailed,
    Empty,
    Mismatch,
    NoRoom,
    PermissionRefused,
    ProtocolError,
    VersionSkew,
    WeightcacheError,
)
from weightcache.fingerprint import diff
from weightcache.memory import memfd
from weightcache.memory.host import HostMemory
from weightcache.paths import RankPaths
from weightcache.protocol import Attached, DonationInvited, LoadProgress, Message, Progress, failure

PRINT = fingerprint()


@pytest.fixture
def paths(runtime_dir: Path) -> RankPaths:
    return RankPaths(runtime_dir, 0)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = open_fds()
    yield
    deadline = time.monotonic() + 2
    while open_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds() <= before


def question(paths: RankPaths, **changes: Any) -> Offer | Invitation:
    return ask(paths.public, directive(paths, **changes), PRINT, HostMemory(), lambda progress: None)


def test_an_offer(paths: RankPaths) -> None:
    with agent(paths.public, offering()) as fake:
        offer = question(paths, wait_seconds=2.5, donate=True, on_mismatch="evict")
        assert isinstance(offer, Offer)
        assert (offer.set_id, offer.role, offer.region.size) == ("a-set", "target", 2 * 65536)
        assert offer.manifest.bytes == 2 * 65536
        assert set(offer.milliseconds) == {"connect", "receive", "map"}
        assert fake.seen == [protocol.Attach("target", "g", PRINT, 2.5, donate=True, evict=True)]
        offer.withdraw()


@pytest.mark.parametrize("error", [AttachFailed("no"), NoRoom("full"), RuntimeError("surprise")])
def test_what_cannot_be_mapped_is_no_offer(paths: RankPaths, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(HostMemory, "map", fail)
    with agent(paths.public, offering()), pytest.raises(type(error), match=str(error)):
        question(paths)


def test_a_manifest_that_makes_no_sense_unmaps_again(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    real = HostMemory().map

    def watched(_: HostMemory, fds: Any, sizes: Any) -> Any:
        region = real(fds, sizes)
        close = region.close
        monkeypatch.setattr(region, "close", lambda: (closed.append(region.size), close()))
        return region

    monkeypatch.setattr(HostMemory, "map", watched)
    monkeypatch.setattr("weightcache.manifest.MAX_BYTES", 10)
    with agent(paths.public, offering()), pytest.raises(ProtocolError, match="at most 10 are allowed"):
        question(paths)
    assert closed == [2 * 65536]


@pytest.mark.parametrize("fails", [False, True])
def test_mapping_waits_for_no_long_turns_of_the_decoding(
    paths: RankPaths, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    usual, turns, decode = sys.getswitchinterval(), [], manifest.decode

    def decoding(data: bytes) -> manifest.Manifest:
        turns.append(sys.getswitchinterval())
        return decode(b"no JSON" if fails else data)

    monkeypatch.setattr(manifest, "decode", decoding)
    with (
        agent(paths.public, offering()),
        pytest.raises(ProtocolError) if fails else contextlib.nullcontext(),
    ):
        answer = question(paths)
        assert isinstance(answer, Offer)
        answer.withdraw()
    assert len(turns) == 1
    assert turns[0] < usual / 10
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_explaining_never_evicts(paths: RankPaths) -> None:
    with agent(paths.public, offering()) as fake:
        offer = question(paths, on_mismatch="evict", explain=True)
        assert isinstance(offer, Offer)
        assert fake.seen == [protocol.Attach("target", "g", PRINT, 0.0, donate=False, evict=False)]
        offer.withdraw()


def test_withdrawing_gives_everything_back(paths: RankPaths) -> None:
    with agent(paths.public, offering()):
        question(paths).withdraw()


def test_progress_and_then_an_invitation(paths: RankPaths) -> None:
    seen: list[LoadProgress] = []
    steps = [Progress(LoadProgress("loading", n, 9, 0.5)) for n in range(3)]
    with agent(paths.public, answering(*steps, DonationInvited("a-token"))):
        invitation = ask(paths.public, directive(paths), PRINT, HostMemory(), seen.append)
        assert isinstance(invitation, Invitation)
        assert invitation.token == "a-token"
        assert [progress.bytes_done for progress in seen] == [0, 1, 2]
        invitation.withdraw()


def test_a_mismatch_says_in_what(paths: RankPaths) -> None:
    differences = diff(fingerprint(dtype="a"), fingerprint(dtype="b"))
    with (
        agent(paths.public, answering(failure(Mismatch("it differs"), differences))),
        pytest.raises(Mismatch) as caught,
    ):
        question(paths)
    assert caught.value.differences == differences


def test_a_refusal_is_its_own_error(paths: RankPaths) -> None:
    with agent(paths.public, answering(failure(Empty("nothing is here")))), pytest.raises(Empty, match="nothing"):
        question(paths)


def test_no_agent(paths: RankPaths) -> None:
    with pytest.raises(AgentUnavailable):
        question(paths)


def test_an_impostor(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "trusted_uids", lambda: frozenset({4_000_000}))
    with agent(paths.public, offering()) as fake:
        with pytest.raises(PermissionRefused):
            question(paths)
        assert fake.seen == []


def test_a_silent_agent_ends_at_the_deadline(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.2)
    with agent(paths.public, answering()):
        started = time.monotonic()
        with pytest.raises(AgentUnavailable, match="did not answer"):
            question(paths, wait_seconds=0.2)
        assert 0.3 < time.monotonic() - started < 2


def test_progress_does_not_move_the_deadline(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 0.3)

    def script(peer: Peer, message: Message) -> None:
        for _ in range(100):
            peer.send(Progress(LoadProgress("loading", 0, 0, 0.0)))
            time.sleep(0.02)

    with agent(paths.public, script):
        started = time.monotonic()
        with pytest.raises(AgentUnavailable):
            question(paths)
        assert time.monotonic() - started < 1.5


def bad_offers() -> dict[str, Any]:
    """Scripts of an agent that answers with something that is no set."""

    def with_mode(mode: str) -> Any:
        def script(peer: Peer, message: Message) -> None:
            made = make(PRINT, mode=mode)
            peer.send(Attached("s", "target", "l", made.info.arenas), made.fds)
            transport.close_all(made.fds)

        return script

    def descriptors(count: int, infos: int, announce: int | None = None) -> Any:
        def script(peer: Peer, message: Message) -> None:
            fds = [memfd.sealed("m", b"{}") for _ in range(count)]
            peer.send(Attached("s", "target", "l", arenas(*[512] * infos)), fds, announce)
            transport.close_all(fds)

        return script

    def pushed(answer: Message) -> Any:
        def script(peer: Peer, message: Message) -> None:
            fds = [memfd.sealed("m", b"{}") for _ in range(5)]
            for _ in range(3):
                peer.send(answer, fds)
            peer.send(protocol.Accepted(), fds)
            transport.close_all(fds)

        return script

    def other_role(peer: Peer, message: Message) -> None:
        made = make(PRINT)
        peer.send(Attached("s", "draft-1", "l", made.info.arenas), made.fds)
        transport.close_all(made.fds)

    return {
        "unsealed-manifest": with_mode("unsealed-manifest"),
        "bad-manifest": with_mode("bad-manifest"),
        "large-manifest": with_mode("large-manifest"),
        "missing-fd": with_mode("missing-fd"),
        "no-fds": descriptors(0, 2),
        "only-arenas": descriptors(2, 2),
        "too-many": descriptors(5, 2),
        "wrongly-announced": descriptors(3, 2, announce=2),
        "pushed-with-progress": pushed(Progress(LoadProgress("loading", 0, 0, 0.0))),
        "another-message": answering(protocol.Accepted()),
        "garbage": lambda peer, message: peer.raw(b"\0\1\2"),
        "skew": lambda peer, message: peer.raw(b'{"protocol": 99}'),
        "oversized": lambda peer, message: peer.raw(b" " * (transport.MAX_PACKET + 1)),
        "hang-up": lambda peer, message: peer.close(),
        "other-role": other_role,
    }


@pytest.mark.parametrize("name", bad_offers())
def test_a_bad_answer_is_an_error_and_leaves_nothing_open(paths: RankPaths, name: str) -> None:
    expected: type[WeightcacheError] = {"skew": VersionSkew, "hang-up": AgentUnavailable}.get(name, ProtocolError)
    with agent(paths.public, bad_offers()[name]), pytest.raises(WeightcacheError) as caught:
        question(paths)
    assert type(caught.value) is expected


def test_a_callback_that_fails_leaves_nothing_open(paths: RankPaths) -> None:
    def fail(progress: LoadProgress) -> None:
        raise RuntimeError("no")

    with agent(paths.public, answering(Progress(LoadProgress("loading", 0, 0, 0.0)))), pytest.raises(RuntimeError):
        ask(paths.public, directive(paths), PRINT, HostMemory(), fail)


def test_where_a_rank_is_served_on_the_host(paths: RankPaths) -> None:
    assert socket_of(directive(paths), torch.device("cpu"), 0) == paths.public
    with pytest.raises(AgentUnavailable, match="no agent serves rank:3"):
        socket_of(directive(paths), torch.device("cpu"), 3)


def test_an_engine_finds_its_gpu_and_never_its_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightcache.memory import cuda_vmm

    monkeypatch.setattr(cuda_vmm, "device_uuid", lambda index: f"GPU-{index}")
    sockets = {"GPU-1": "/a", "rank:0": "/b"}
    assert socket_of(directive(sockets=sockets), torch.device("cuda", 1), 0) == Path("/a")
    with pytest.raises(AgentUnavailable, match="no agent serves GPU-0"):
        socket_of(directive(sockets=sockets), torch.device("cuda", 0), 0)
    loader = directive(sockets=sockets, purpose="loader")
    assert socket_of(loader, torch.device("cuda", 0), 0) == Path("/b")
    assert socket_of(loader, torch.device("cuda", 1), 0) == Path("/a")


def test_a_manifest_has_a_limit(paths: RankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_BYTES", 10)
    with agent(paths.public, offering()), pytest.raises(ProtocolError, match="at most 10 are allowed"):
        question(paths)
