"""Donation: whatever happens to the publication, the engine has its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.test_loader import fingerprint
from tests.unit.engine.fakes import DefaultModelLoader, FakeAgent, Peer, agent, directive
from tests.unit.export.trees import fill
from weightcache.engine import adapter, donate as donating, state
from weightcache.engine.donate import Donation, donate, publish_path
from weightcache.errors import (
    AgentUnavailable,
    ExportRefused,
    InUse,
    PermissionRefused,
    UnsupportedMethod,
    WeightcacheError,
)
from weightcache.memory.host import HostMemory
from weightcache.paths import RankPaths
from weightcache.protocol import (
    Abort,
    Accepted,
    Begin,
    Commit,
    Committed,
    Message,
    Progress,
    Publish,
    Published,
    failure,
)


class Model(nn.Module):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def load(self) -> None:
        fill(self)

    def forward(self, values: torch.Tensor) -> Any:
        return self.linear(values)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> state.ProcessState:
    fresh = state.ProcessState()
    monkeypatch.setattr(state, "process", fresh)
    return fresh


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> DefaultModelLoader:
    loader = DefaultModelLoader(Model, [])

    @contextlib.contextmanager
    def after_construction(callback: Any) -> Iterator[None]:
        loader.on_built.append(callback)
        yield
        loader.on_built.remove(callback)

    monkeypatch.setattr(adapter, "after_construction", after_construction)
    return loader


@pytest.fixture
def paths(runtime_dir: Path) -> RankPaths:
    return RankPaths(runtime_dir, 0)


def accepting(peer: Peer, message: Message) -> None:
    match message:
        case Begin():
            peer.send(Accepted())
        case Publish():
            peer.send(Published("a-set"))
        case Commit():
            peer.send(Committed(("a-set",)))


def give(inner: DefaultModelLoader, paths: RankPaths) -> Donation:
    def load() -> Any:
        return inner.load_model(model_config=None, device_config=None)

    return donate(
        load,
        inner,
        fingerprint(),
        HostMemory(),
        torch.device("cpu"),
        paths.public,
        "a-token",
        "a-group",
        directive(paths),
    )


def kinds(fake: FakeAgent) -> list[type]:
    return [type(message) for message in fake.seen if not isinstance(message, Progress)]


def check_model(donation: Donation) -> None:
    assert torch.equal(donation.model(torch.eye(8)), donation.model.linear.weight.t())


def test_a_donation(inner: DefaultModelLoader, paths: RankPaths, process: state.ProcessState) -> None:
    with agent(paths.publish, accepting) as fake:
        donation = give(inner, paths)
        fake.wait(4)
    assert kinds(fake) == [Begin, Publish, Commit]
    assert fake.seen[0] == Begin("donor", "a-group", "a-token")
    published = next(message for message in fake.seen if isinstance(message, Publish))
    assert published.set.tensors == 1
    assert donation.reason is None
    assert donation.produced is not None
    assert donation.produced.set_id == "a-set"
    assert process.shares_weights
    assert process.keep == [donation.produced.region]
    check_model(donation)


@pytest.mark.parametrize("kind", ["absent", "impostor", "refusing"])
def test_an_agent_that_does_not_take_it(
    inner: DefaultModelLoader,
    paths: RankPaths,
    process: state.ProcessState,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(peer: Peer, message: Message) -> None:
        peer.send(failure(PermissionRefused("not you")))

    if kind == "impostor":
        monkeypatch.setattr("weightcache.client.trusted_uids", lambda: frozenset({4_000_000}))
    with contextlib.nullcontext() if kind == "absent" else agent(paths.publish, refuse):
        donation = give(inner, paths)
    assert isinstance(donation.reason, AgentUnavailable if kind == "absent" else PermissionRefused)
    assert donation.produced is None
    assert inner.loads == 1
    assert not process.shares_weights
    check_model(donation)
    donation.model.linear.weight.data.zero_()  # it is the engine's own memory


def failing(error: Exception) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [UnsupportedMethod("fp8"), ExportRefused("no"), RuntimeError("out of memory"), OSError("disk")]
)
@pytest.mark.parametrize("where", ["gate.check", "produce"])
def test_a_model_that_cannot_be_carried(
    inner: DefaultModelLoader,
    paths: RankPaths,
    process: state.ProcessState,
    where: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"weightcache.engine.donate.{where}", failing(error))
    with agent(paths.publish, accepting) as fake:
        donation = give(inner, paths)
        fake.wait(3)
    assert kinds(fake) == [Begin, Abort]
    assert isinstance(donation.reason, WeightcacheError)
    assert str(error) in donation.reason.message
    assert not process.shares_weights
    check_model(donation)


@pytest.mark.parametrize("at", [Publish, Commit])
def test_a_publication_that_fails_after_packing_leaves_read_only_weights(
    inner: DefaultModelLoader, paths: RankPaths, process: state.ProcessState, at: type
) -> None:
    """The arenas are sealed by then: a verb that writes would end the engine, so it must be refused."""

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, at):
            peer.send(failure(InUse("somebody was faster")))
        else:
            accepting(peer, message)

    with agent(paths.publish, script):
        donation = give(inner, paths)
    assert donation.produced is None
    assert isinstance(donation.reason, InUse)
    assert process.shares_weights
    assert len(process.keep) == 1
    check_model(donation)


def test_an_agent_that_dies_while_loading(
    inner: DefaultModelLoader, paths: RankPaths, process: state.ProcessState
) -> None:
    with agent(paths.publish, accepting) as fake:
        original = inner.load_model

        def load_model(**kwargs: Any) -> Any:
            fake.close()
            return original(**kwargs)

        inner.load_model = load_model  # type: ignore[method-assign]
        donation = give(inner, paths)
    assert isinstance(donation.reason, AgentUnavailable)
    check_model(donation)


def test_a_loader_that_builds_two_models(
    inner: DefaultModelLoader, paths: RankPaths, process: state.ProcessState
) -> None:
    original = inner.load_model

    def twice(**kwargs: Any) -> Any:
        original(**kwargs)
        return original(**kwargs)

    inner.load_model = twice  # type: ignore[method-assign]
    with agent(paths.publish, accepting):
        donation = give(inner, paths)
    assert donation.reason is not None
    assert "2 models where one was expected" in donation.reason.message
    check_model(donation)


def test_the_publish_socket_is_beside_the_public_one() -> None:
    assert publish_path(Path("/run/weightcache/3.sock")) == Path("/run/weightcache/3.publish.sock")


def test_the_walk_of_the_construction_keeps_no_tensor(
    inner: DefaultModelLoader, paths: RankPaths, process: state.ProcessState
) -> None:
    with agent(paths.publish, accepting):
        publication = donating.Publication(paths.publish, source="donor", group="g", token="t")
        observed = donating.load_observed(
            lambda: inner.load_model(model_config=None, device_config=None), inner, fingerprint(), publication
        )
        publication.close()
    assert [entry.tensor.numel() for entry in observed.built.tensors] == [0]
