"""One rank of a launch of two: with what the other one says, it loads, goes on with what it holds, or loads anew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.test_loader import fingerprint
from tests.unit.engine.fakes import DefaultModelLoader, FakeAgent, Peer, agent, directive
from tests.unit.export import roundtrip as way
from weightcache import manifest
from weightcache.content import content_of
from weightcache.engine import adapter, gate, state, together
from weightcache.engine.adapter_together import NeedsOthers
from weightcache.engine.donate import publish_path
from weightcache.engine.together import Source, load_together
from weightcache.errors import InUse, LoadFailed, Mismatch, WeightcacheError
from weightcache.loader import standing
from weightcache.loader.export import export
from weightcache.loader.pack import pack
from weightcache.loader.publication import Publication
from weightcache.loader.standing import Loaded, Said, Standing
from weightcache.loader.walk import walk
from weightcache.memory import arena_sizes, memfd
from weightcache.memory.digest import digest
from weightcache.memory.host import HostMemory
from weightcache.paths import RankPaths
from weightcache.protocol import (
    Accepted,
    Anew,
    ArenaInfo,
    Begin,
    Borrow,
    Lent,
    Message,
    Progress,
    Publish,
    Published,
    Rejoin,
    SetInfo,
    failure,
)

OTHER = "b" * 32
"""What the other rank has."""


class Model(nn.Module):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def load(self) -> None:
        self.linear.weight.data.copy_(torch.arange(64).view(8, 8))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def loaded() -> tuple[SetInfo, bytes, tuple[int, ...]]:
    """What this rank's agent would hold: its description, its manifest, and its arenas."""
    model = Model()
    built = walk(model).without_tensors()
    model.load()
    done = export(model.eval(), built, way.CPU)
    body = manifest.encode(done.manifest)
    memory = HostMemory()
    sizes = arena_sizes(done.manifest.bytes, memory.granularity, 0)
    region = memory.reserve(sum(sizes))
    pack(done, region, sizes, keep_private=False)
    used = done.manifest.bytes
    arenas = (ArenaInfo(sizes[0], used, digest(region.bytes_at(0, used))),)
    print_ = fingerprint()
    info = SetInfo("target", print_.model_path, print_.revision, print_, arenas, 1, 0.0, 0)
    return info, body, region.freeze()


@dataclass
class Rank:
    """The rank that is tested, the agent that it talks to, and what the other rank will say."""

    paths: RankPaths
    inner: DefaultModelLoader
    own: str
    lent: Lent
    descriptors: tuple[int, ...]
    says: list[Said] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    begun: Accepted = field(default_factory=Accepted)
    borrowed: WeightcacheError | None = None
    first: Callable[[], None] = lambda: None
    """What happens in the first load."""
    fake: FakeAgent | None = None
    apart: list[tuple[bool, ...]] = field(default_factory=list)

    @contextlib.contextmanager
    def alone(self, known: tuple[bool, ...]) -> Iterator[None]:
        self.apart.append(known)
        yield

    def script(self, peer: Peer, message: Message) -> None:
        match message:
            case Begin():
                peer.send(self.begun)
            case Borrow() if self.borrowed is not None:
                peer.send(failure(self.borrowed))
            case Borrow():
                peer.send(self.lent, self.descriptors)
            case Rejoin() | Anew():
                peer.send(Accepted())
            case Publish():
                peer.send(Published("a-set"))

    def exchange(self, said: bytes) -> list[bytes]:
        self.said.append(standing.records.from_tagged((Standing, Loaded), said))
        return [said, standing.encode(self.says.pop(0))]

    def load(self, role: str = "target") -> Any:
        def run() -> nn.Module:
            first, self.first = self.first, lambda: None
            first()
            model: nn.Module = self.inner.load_model(model_config=None, device_config=None)
            return model

        with agent(self.paths.publish, self.script) as self.fake:
            publication = Publication(publish_path(self.paths.public), source="loader", group="new", token="t")
            source = Source(
                run, self.inner, fingerprint(role=role), HostMemory(), torch.device("cpu"),
                directive(self.paths, purpose="loader"), on_meta,
            )  # fmt: skip
            try:
                return load_together(source, publication)
            finally:
                publication.close()

    @property
    def kinds(self) -> list[type]:
        """What the agent was told."""
        assert self.fake is not None
        return [type(message) for message in self.fake.seen if not isinstance(message, Progress)]

    @property
    def published(self) -> Publish:
        assert self.fake is not None
        (found,) = [message for message in self.fake.seen if isinstance(message, Publish)]
        return found


@pytest.fixture
def rank(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    inner = DefaultModelLoader(Model, [])

    @contextlib.contextmanager
    def after_construction(callback: Any) -> Iterator[None]:
        inner.on_built.append(callback)
        yield
        inner.on_built.remove(callback)

    info, body, arenas = loaded()
    own = content_of(info, body)
    described = memfd.sealed("test-manifest", body)
    lent = Lent(info.arenas, "old", (own, OTHER))
    made = Rank(RankPaths(runtime_dir, 0), inner, own, lent, (described, *arenas))
    monkeypatch.setattr(state, "process", state.ProcessState())
    monkeypatch.setattr(adapter, "after_construction", after_construction)
    monkeypatch.setattr(adapter, "world", lambda: (0, 2, None))
    monkeypatch.setattr(adapter, "parallel", lambda: SimpleNamespace(pp_size=1))
    monkeypatch.setattr(gate, "check", lambda *_: None)
    monkeypatch.setattr(together, "exchange", made.exchange)
    monkeypatch.setattr(together, "neighbours", lambda: (True, False))
    monkeypatch.setattr(together, "alone", made.alone)
    yield made
    for fd in made.descriptors:
        os.close(fd)
    assert made.says == [], "the other rank would wait for ever"


HOLDS = Standing("holds", "old", ("a" * 32, OTHER))


def test_the_first_load_tells_all_what_each_has(rank: Rank) -> None:
    rank.says = [Standing("lost"), Loaded(OTHER)]
    rank.load()
    assert rank.kinds == [Begin, Publish]
    assert rank.apart == []
    assert rank.published.contents == (rank.own, OTHER)
    assert state.process.rejoined == ""


def test_a_rank_that_holds_its_weights_goes_on_with_them(rank: Rank) -> None:
    rank.begun = Accepted(holds=True)
    rank.says = [Standing("lost"), Loaded(OTHER)]
    model = rank.load()
    assert rank.kinds == [Begin, Borrow]
    assert rank.inner.loads == 0
    expected = Model()
    expected.load()
    assert torch.equal(model.linear.weight, expected.linear.weight)
    assert not model.training
    assert state.process.rejoined == "old"
    assert rank.said[1] == Loaded(rank.own)
    assert rank.apart == [(True, False)], "its model is constructed without the others, too"


def test_a_rank_that_lost_its_weights_rejoins_the_others(rank: Rank) -> None:
    rank.says = [Standing("holds", "old", (rank.own, OTHER)), Loaded(OTHER)]
    rank.load()
    assert rank.kinds == [Begin, Rejoin, Publish]
    assert rank.fake is not None
    assert Rejoin("old", "target", rank.own) in rank.fake.seen
    assert rank.published.contents == (rank.own, OTHER)
    assert rank.said == [Standing("lost"), Loaded(rank.own)]
    assert rank.apart == [(True, False)]


def test_what_cannot_be_loaded_alone_is_loaded_by_all(rank: Rank) -> None:
    def needs_others() -> None:
        raise NeedsOthers("loading needs the other ranks (all_reduce)")

    rank.first = needs_others
    rank.says = [Standing("holds", "old", (rank.own, OTHER)), Loaded(OTHER), Loaded("c" * 32)]
    rank.load()
    assert rank.kinds == [Begin, Rejoin, Anew, Publish]
    assert rank.said[1] == Loaded("", "loading needs the other ranks (all_reduce)")
    assert rank.published.contents == (rank.own, "c" * 32)
    assert state.process.rejoined == ""


def test_other_bytes_are_published_with_those_of_all(rank: Rank) -> None:
    """What this rank has loaded is of this launch: it need not load again."""
    rank.says = [HOLDS, Loaded(OTHER), Loaded("c" * 32)]
    rank.load()
    assert rank.kinds == [Begin, Rejoin, Anew, Publish]
    assert rank.inner.loads == 1
    assert rank.published.contents == (rank.own, "c" * 32)


def test_a_holder_loads_when_the_other_did_not_get_its_own_back(rank: Rank) -> None:
    rank.begun = Accepted(holds=True)
    rank.says = [Standing("lost"), Loaded("c" * 32), Loaded("c" * 32)]
    rank.load()
    assert rank.kinds == [Begin, Borrow, Anew, Publish]
    assert rank.inner.loads == 1
    assert rank.published.contents == (rank.own, "c" * 32)


@pytest.mark.parametrize("lost", ["here", "there"])
def test_what_engines_use_is_not_loaded_anew(rank: Rank, lost: str) -> None:
    why = "1 engine uses its weights"
    if lost == "there":
        rank.begun = Accepted(holds=True, in_use=why)
        rank.says = [Standing("lost"), Loaded("c" * 32)]
    else:
        rank.says = [Standing("holds", "old", ("a" * 32, OTHER), in_use=why), Loaded(OTHER)]
    with pytest.raises(InUse) as refused:
        rank.load()
    number = int(lost == "here")
    sentence = f"rank {number}: {why} (rank {1 - number}: what it loaded is not what it had lost)"
    assert refused.value.message == sentence
    assert Anew not in rank.kinds
    assert Publish not in rank.kinds


def test_weights_of_other_conditions_are_loaded_by_all(rank: Rank) -> None:
    rank.begun = Accepted(holds=True)
    rank.borrowed = Mismatch("what it holds was loaded under other conditions (dtype)")
    rank.says = [Standing("lost"), Loaded(OTHER)]
    rank.load()
    assert rank.kinds == [Begin, Borrow, Anew, Publish]
    assert rank.said[0] == Standing("anew", why="what it holds was loaded under other conditions (dtype)")


def test_arenas_that_cannot_be_mapped_are_loaded_by_all(rank: Rank) -> None:
    rank.begun = Accepted(holds=True)
    rank.lent = Lent(tuple(ArenaInfo(a.bytes * 2, a.used, a.digest) for a in rank.lent.arenas), "old", ("", OTHER))
    rank.says = [Standing("lost"), Loaded(OTHER)]
    rank.load()
    assert rank.kinds == [Begin, Borrow, Anew, Publish]


def test_a_draft_that_cannot_be_brought_back_ends_the_launch(rank: Rank) -> None:
    """Its target was brought back, so that nothing can be loaded anew in this process."""
    state.process.rejoined = "old"
    rank.says = [Standing("anew", why="its draft is another one")]
    with pytest.raises(
        LoadFailed, match=r"draft-0 weights cannot be brought back \(rank 1: its draft is another one\)"
    ):
        rank.load("draft-0")
    assert rank.kinds == [Begin]


def test_the_draft_of_a_first_load_follows_its_target(rank: Rank) -> None:
    rank.says = [Loaded(OTHER)]
    rank.load("draft-0")
    assert rank.kinds == [Begin, Publish]


def test_a_draft_that_only_some_ranks_have_is_no_matter_of_all(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "parallel", lambda: SimpleNamespace(pp_size=2))
    rank.load("draft-0")
    assert rank.published.contents == ()


def test_a_single_rank_asks_nobody(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "world", lambda: (0, 1, None))
    rank.load()
    assert rank.kinds == [Begin, Publish]
    assert rank.published.contents == ()
