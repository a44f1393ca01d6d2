"""Several ranks of a host load in one launch: whoever asks, all take part, and what fails on one fails on all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import test_loader
from tests.unit.server.harness import SECONDS, Agent, eventually
from tests.unit.server.ranks import RANKS, Ranks, failure, load_again, one_group
from weightcache import protocol, transport
from weightcache.client import Conversation
from weightcache.errors import Drained, LoadFailed, PermissionRefused, ProtocolError, WeightcacheError
from weightcache.server import settings


@pytest.mark.parametrize("asked", range(RANKS))
def test_whoever_is_asked_all_load(ranks: Ranks, asked: int) -> None:
    ranks.start()
    ranks.load(asked).result(SECONDS)
    for agent in ranks.agents:
        agent.await_state("ready")
    assert one_group(ranks)
    assert ranks.launches() == 1


def test_all_at_once_is_one_launch(ranks: Ranks) -> None:
    ranks.start("--load")
    for agent in ranks.agents:
        agent.await_state("ready")
    assert one_group(ranks)
    assert ranks.launches() == 1


def test_the_loader_gets_the_layout(ranks: Ranks) -> None:
    ranks.configure(model=["--model-path", "m", "--trust-remote-code"])
    ranks.start()
    ranks.load(1).result(SECONDS)
    assert f"test loader starts --model-path m --trust-remote-code --tp-size {RANKS}" in ranks.agents[0].text()


def test_a_rank_without_an_agent_is_named(ranks: Ranks) -> None:
    for agent in ranks.agents[:2]:
        agent.start()
    error = failure(ranks.load(1))
    assert isinstance(error, LoadFailed)
    assert "rank 2 cannot take part in the load: no agent listens at" in error.message
    assert ranks.agents[0].status().state == ranks.agents[1].status().state == "failed"
    ranks.agents[2].start()
    ranks.load(2).result(SECONDS)
    assert one_group(ranks)


def test_a_leader_without_an_agent_is_named(ranks: Ranks) -> None:
    ranks.agents[1].start()
    message = failure(ranks.load(1)).message
    assert message.startswith("rank 0 loads for all ranks of this host, and does not: no agent listens at")


@pytest.mark.parametrize("wrong", range(RANKS))
def test_what_fails_on_one_rank_fails_on_all_with_its_reason(ranks: Ranks, wrong: int) -> None:
    ranks.configure({"WCTEST_MODE": "abort", "WCTEST_RANK": str(wrong)})
    ranks.start()
    reason = "the checkpoint /models/none is missing"
    for rank, future in enumerate([ranks.load(rank) for rank in range(RANKS)]):
        message = failure(future).message
        assert message.endswith(reason), message
        assert f"rank {wrong}: " in message or rank == wrong or wrong == 0
    assert ranks.groups() == [[]] * RANKS
    assert ranks.launches() == 1


def test_a_rank_process_that_vanishes_ends_the_launch(ranks: Ranks) -> None:
    ranks.agents[0].gate("loading-1")
    ranks.start()
    loading = [ranks.load(rank) for rank in range(RANKS)]
    os.kill(ranks.agents[0].reached("loading-1"), signal.SIGKILL)
    for future in loading:
        failure(future)
    assert ranks.groups() == [[]] * RANKS


@pytest.mark.parametrize("gate", ["begun-1", "loading-1", "staged-1", "complete-1"])
@pytest.mark.parametrize("killed", [0, 1])
def test_an_agent_killed_in_the_middle_ends_the_launch(ranks: Ranks, gate: str, killed: int) -> None:
    ranks.agents[0].gate(gate)
    ranks.start()
    others = [rank for rank in range(RANKS) if rank != killed]
    loading = [ranks.load(rank) for rank in others]
    loader = ranks.agents[0].reached(gate)
    ranks.agents[killed].stop(signal.SIGKILL)
    for future in loading:
        message = failure(future).message
        assert "went away" in message or "rank 1" in message, message
    eventually(lambda: not Path(f"/proc/{loader}").exists(), what="the loader lives on")
    assert [ranks.agents[rank].status().sets for rank in others] == [(), ()]
    ranks.agents[0].lift(gate)
    ranks.agents[killed].start()
    ranks.load(killed).result(SECONDS)
    assert one_group(ranks)
    assert ranks.launches() == 2


@pytest.mark.parametrize("stopped", [0, 2])
def test_an_agent_that_is_stopped_ends_the_launch(ranks: Ranks, stopped: int) -> None:
    ranks.agents[0].gate("loading-1")
    ranks.start()
    others = [rank for rank in range(RANKS) if rank != stopped]
    loading = [ranks.load(rank) for rank in others]
    ranks.agents[0].reached("loading-1")
    assert ranks.agents[stopped].stop() == 0
    for future in loading:
        failure(future)


def test_torn_between_commits(ranks: Ranks) -> None:
    """The others have committed, this one's agent is gone: the next load brings it back to them."""
    ranks.agents[0].gate("agreed-1")
    ranks.start()
    loading = ranks.load(0)
    ranks.agents[0].reached("agreed-1")
    for agent in (ranks.agents[0], ranks.agents[2]):
        agent.await_state("ready")
    first = ranks.agents[0].status().sets[0].group
    ranks.agents[1].stop(signal.SIGKILL)
    loading.result(SECONDS)  # rank 0 has its weights
    ranks.agents[0].lift("agreed-1")
    ranks.agents[1].start()
    ranks.load(1).result(SECONDS)
    assert one_group(ranks) == first


def test_a_set_in_use_stays_until_its_engine_ends(ranks: Ranks) -> None:
    ranks.start()
    ranks.load(0).result(SECONDS)
    first = one_group(ranks)
    with ranks.agents[2].attach(test_loader.fingerprint(), wait=0.0):
        load_again(ranks.agents[0])
        eventually(lambda: len(ranks.agents[2].status().sets) == 2, what="no second set")
        assert [len(sets) for sets in ranks.groups()] == [1, 1, 2]
    eventually(lambda: len(ranks.agents[2].status().sets) == 1, what="the first set stays")
    assert one_group(ranks) != first


def test_a_drained_rank_takes_no_part(ranks: Ranks) -> None:
    ranks.start()
    ranks.agents[1].ask(protocol.Drain(0.0))
    assert "rank 1 cannot take part in the load: rank 1 was drained by" in failure(ranks.load(0)).message
    assert isinstance(failure(ranks.load(1)), Drained)


def kinship(ranks: Ranks) -> str:
    """What all of these agents have in common."""
    config = ranks.agents[0].folder / "config.toml"
    return settings.resolve(settings.Options(1, config, ranks.agents[0].paths.directory)).kinship


def test_who_asks_whom(ranks: Ranks) -> None:
    """Different configurations are noticed, and a rank that is in a launch joins no other one."""
    ranks.agents[0].gate("loading-1")
    ranks.start()
    loading = ranks.load(0)
    ranks.agents[0].reached("loading-1")
    refused = {
        protocol.Join("other", True, kinship(ranks)): "rank 1 is in the middle of another load",
        protocol.Join("other", True, "another"): "its agent was started with another configuration",
    }
    for request, why in refused.items():
        with Conversation(ranks.agents[1].paths.public) as conversation, pytest.raises(WeightcacheError) as error:
            conversation.request(request, protocol.Joined, SECONDS)
        assert why in str(error.value)
    for rank, asks in ((1, 2), (0, 7)):
        with Conversation(ranks.agents[rank].paths.public) as conversation, pytest.raises(ProtocolError):
            conversation.request(protocol.Lead(asks, True), protocol.Done)
    ranks.agents[0].open("loading-1")
    loading.result(SECONDS)


def test_a_restart_with_another_configuration_loads_for_nobody(ranks: Ranks) -> None:
    ranks.start()
    ranks.agents[2].stop()
    ranks.configure(model=["--model-path", "another"])
    ranks.agents[2].start()
    message = failure(ranks.load(2)).message
    assert message.endswith(
        "rank 2 cannot take part in the load: its agent was started with another configuration: "
        "restart the agents of all ranks"
    )
    assert ranks.launches() == 0


def test_simultaneous_requests_are_one_launch_however_long_it_takes(ranks: Ranks) -> None:
    """A request that reaches the leader after the launch has begun is part of it already."""
    ranks.start()
    for round_ in range(1, 9):
        for future in [ranks.load(rank) for rank in reversed(range(RANKS))]:
            future.result(SECONDS)
        one_group(ranks)
        assert ranks.launches() == round_
        for agent in ranks.agents:
            agent.ask(protocol.Evict(None))


def test_a_leader_killed_before_any_rank_began(ranks: Ranks) -> None:
    """Nobody holds anything yet, and nobody is in the way of the next launch."""
    ranks.agents[0].gate("started")
    ranks.start("--load")
    ranks.agents[0].reached("started")
    ranks.agents[0].stop(signal.SIGKILL)
    ranks.agents[0].lift("started")
    ranks.agents[0].start("--load")
    assert one_group(ranks)


def test_a_loader_that_does_not_begin_costs_nothing(ranks: Ranks) -> None:
    ranks.configure({"WCTEST_GATES": str(ranks.agents[0].gates)})
    ranks.start()
    ranks.load(0).result(SECONDS)
    group = one_group(ranks)
    ranks.agents[0].gate("started")
    again = ranks.pool.submit(load_again, ranks.agents[0])
    os.kill(ranks.agents[0].reached("started"), signal.SIGKILL)
    failure(again)
    assert one_group(ranks) == group


def test_engines_elsewhere_are_not_disturbed_by_a_load_that_nobody_asked_for(ranks: Ranks) -> None:
    ranks.start()
    ranks.load(0).result(SECONDS)
    first = one_group(ranks)
    with ranks.agents[0].attach(test_loader.fingerprint(), wait=0.0):
        ranks.seed(7)
        ranks.agents[2].stop()
        ranks.agents[2].start("--load")
        ranks.agents[2].await_state("failed")
        error = ranks.agents[2].status().error
        assert error is not None
        assert "1 engine uses its weights, and a load for all ranks needs room beside them" in error.message
        assert ranks.groups()[:2] == [[first], [first]]
        time.sleep(1.1)  # what failed is not tried again at once
        ranks.load(2).result(SECONDS)
        eventually(lambda: len(ranks.agents[0].status().sets) == 2)
    assert one_group(ranks) != first


def test_again_is_for_operators(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start()
    ranks.load(0).result(SECONDS)
    refused = as_somebody_else(ranks.agents[0], protocol.Load(1.0, again=True))
    assert isinstance(refused, PermissionRefused)
    assert one_group(ranks)


@pytest.mark.parametrize("message", [protocol.Join("g", True, ""), protocol.Lead(1, True)])
def test_only_agents_of_the_same_user_load_together(ranks: Ranks, message: protocol.Message) -> None:
    ranks.agents[0].start()
    assert isinstance(as_somebody_else(ranks.agents[0], message), PermissionRefused)


def as_somebody_else(agent: Agent, message: protocol.Message) -> WeightcacheError:
    """What an agent refuses another user who may connect."""
    if os.geteuid():
        pytest.skip("needs root, to become somebody else")
    agent.paths.public.chmod(0o666)
    for folder in agent.paths.public.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        sock = transport.connect(agent.paths.public, time.monotonic() + SECONDS)
    finally:
        os.seteuid(0)
    with contextlib.closing(sock):
        sock.settimeout(SECONDS)
        transport.send_packet(sock, protocol.encode(message))
        answer = protocol.decode(transport.receive_packet(sock).data)
    assert isinstance(answer, protocol.Failure), answer
    return answer.error()
