"""Donation: an engine that found the rank empty publishes its own load."""

from __future__ import annotations

import pytest

from tests.support import test_loader
from tests.support.test_loader import fingerprint
from tests.unit.server.harness import Agent, contents, donation, eventually, outcome
from weightcache import protocol, transport
from weightcache.errors import CheckpointError, Empty, ProtocolError, StillLoading


@pytest.fixture
def donating(agent: Agent) -> Agent:
    """An agent with nothing configured but donation."""
    agent.configure(model=None)
    return agent.start()


def test_a_donor_becomes_the_first_lease(donating: Agent) -> None:
    with donating.attach(donate=True) as donor:
        assert isinstance(donor.message, protocol.DonationInvited)
        status = donating.status()
        assert status.state == "loading"
        assert status.progress is not None
        assert status.progress.phase == "donor"
        with pytest.raises(StillLoading, match="phase donor"):
            donating.attach(wait=0.0)
        with donation(donating, donor.message.token) as conversation:
            conversation.send(protocol.Progress(protocol.LoadProgress("loading", 1, 2, 0.0)))
            set_id = test_loader.publish(conversation, test_loader.make(fingerprint()))
            assert donating.status().progress.phase == "loading"  # type: ignore[union-attr]
            assert donating.status().sets == ()
            committed = conversation.request(protocol.Commit(1), protocol.Committed)
        assert committed.set_ids == (set_id,)
        [resident] = donating.status().sets
        assert len(resident.leases) == 1
        with donating.attach() as other:
            assert other.message.set_id == set_id
            assert contents(other)[0] == test_loader.arena_bytes(0, 0, 65536)
    eventually(lambda: not donating.status().sets[0].leases)
    assert donating.status().state == "ready"


def test_a_donor_that_goes_leaves_the_rank_empty(donating: Agent) -> None:
    before = donating.fds()
    with donating.attach(donate=True) as donor, donating.public() as waiter:
        waiter.send(protocol.Attach("target", "other", fingerprint(), 10.0))
        with donation(donating, donor.message.token) as conversation:
            test_loader.publish(conversation, test_loader.make(fingerprint()))
            donor.close()
            with pytest.raises(Empty):
                outcome(waiter)
    assert donating.status().state == "empty"
    donating.await_fds(before)


def test_a_donors_publication_that_ends_early(donating: Agent) -> None:
    before = donating.fds()
    with donating.attach(donate=True) as donor:
        with donation(donating, donor.message.token) as conversation:
            test_loader.publish(conversation, test_loader.make(fingerprint()))
            conversation.send(protocol.Abort("export-refused", "a tensor in an unknown place"))
        donating.await_state("empty")
    with donating.attach(donate=True) as again:
        assert isinstance(again.message, protocol.DonationInvited)
    donating.await_state("empty")
    donating.await_fds(before)


def test_a_refused_publication_is_told(donating: Agent) -> None:
    made = test_loader.make(fingerprint(), mode="unsealed")
    with (
        donating.attach(donate=True) as donor,
        donation(donating, donor.message.token) as conversation,
        pytest.raises(ProtocolError, match="sealed"),
    ):
        test_loader.publish(conversation, made)
    assert donating.await_state("empty").error is None


def test_the_same_process_may_donate_a_draft_beside_its_target(donating: Agent) -> None:
    draft = fingerprint(role="draft-1")
    with donating.attach(donate=True) as first, donating.attach(draft, donate=True) as second:
        assert first.message.token == second.message.token
        with pytest.raises(StillLoading):
            donating.attach(donate=True, group="another", wait=0.0)
        with donation(donating, first.message.token) as conversation:
            for wanted in (fingerprint(), draft):
                test_loader.publish(conversation, test_loader.make(wanted))
            conversation.request(protocol.Commit(2), protocol.Committed)
        assert [(s.role, len(s.leases)) for s in donating.status().sets] == [("target", 1), ("draft-1", 1)]


def test_no_invitation_without_the_policy(agent: Agent) -> None:
    agent.configure(model=None, policy={"donation": False})
    agent.start()
    with pytest.raises(Empty):
        agent.attach(donate=True)


def test_waiting_engines_take_over_after_a_donor_failed(agent: Agent) -> None:
    agent.start()
    with agent.attach(donate=True) as donor, agent.public() as waiter:
        waiter.send(protocol.Attach("target", "other", fingerprint(), 15.0))
        waiter.receive()
        donor.close()
        message, fds = outcome(waiter)
        assert isinstance(message, protocol.Attached)
        transport.close_all(fds)


def test_a_donors_failure_is_nobody_elses(agent: Agent) -> None:
    agent.configure({"WCTEST_MODE": "abort"})
    agent.start()
    with agent.attach(donate=True):
        pass
    agent.await_state("empty")
    with pytest.raises(CheckpointError):
        agent.load()
