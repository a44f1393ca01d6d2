"""The decision of a serving engine: what it does, what it tells the launcher, what it gives back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.test_loader import fingerprint
from tests.unit.engine.fakes import DefaultModelLoader, arenas, directive, model_config, open_fds, topology
from tests.unit.export import roundtrip as way
from tests.unit.export.trees import fill
from weightcache import manifest, transport
from weightcache.engine import adapter, serve, state
from weightcache.engine.agree import Agreement, Vote
from weightcache.engine.ask import Invitation, Offer
from weightcache.engine.directive import Decision
from weightcache.engine.donate import Donation
from weightcache.engine.serve import ServingLoader
from weightcache.errors import (
    AgentUnavailable,
    AttachFailed,
    Empty,
    ExportRefused,
    Mismatch,
    NoRoom,
    UnsupportedMethod,
    WeightcacheError,
)
from weightcache.fingerprint import diff
from weightcache.loader.pack import pack
from weightcache.memory import arena_sizes
from weightcache.memory.host import HostMemory

DEVICE = SimpleNamespace(device="cpu")


class Model(nn.Module):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def load(self) -> None:
        fill(self)


class Talk:
    """A conversation with an agent."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Engine:
    """A serving loader over stand-ins; ``answer`` is what the agent gives, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.inner: Any = DefaultModelLoader(Model, [])
        self.config = model_config(folder)
        self.runner = SimpleNamespace(server_args=SimpleNamespace())
        self.answer: Any = AgentUnavailable("no agent listens")
        self.others: list[Vote] = []
        self.apart = False
        self.reports: list[Decision] = []
        self.leases: list[tuple[Any, ...]] = []
        self.asked: list[Any] = []
        self.collecting: list[bool] = []
        self.talk = Talk()
        self.loader: ServingLoader | None = None
        monkeypatch.setattr(state, "process", state.ProcessState())
        monkeypatch.setattr(adapter, "parallel", topology)
        monkeypatch.setattr(adapter, "build_on_meta", self.build)
        monkeypatch.setattr(serve, "observe", lambda *args: fingerprint())
        monkeypatch.setattr(serve, "socket_of", lambda *args: Path("/run/0.sock"))
        monkeypatch.setattr(serve, "ask", self.ask)
        monkeypatch.setattr(serve, "agree", self.agree)
        monkeypatch.setattr(serve, "send_report", lambda directive_, report: self.reports.append(report))
        monkeypatch.setattr(serve, "Lease", lambda *args: self.leases.append(args))

    def build(self, *args: Any) -> nn.Module:
        self.collecting.append(gc.isenabled())
        with torch.device("meta"):
            return Model()

    def ask(self, *args: Any) -> Any:
        self.asked.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def agree(self, vote: Vote, resident: int, group: str) -> Agreement:
        votes = [vote, *self.others]
        lowest = min(votes)
        if lowest is Vote.DONATE and max(votes) is not Vote.DONATE:
            lowest = Vote.DISK
        apart = 1 if self.apart and lowest is Vote.ATTACH else None
        return Agreement(lowest if apart is None else Vote.DISK, votes.index(min(votes)), resident, group, apart)

    def load(self, **changes: Any) -> Any:
        self.loader = ServingLoader(self.inner, self.runner, directive(**changes))
        return self.loader.load_model(model_config=self.config, device_config=DEVICE)

    @property
    def report(self) -> Decision:
        assert len(self.reports) == 1
        return self.reports[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    before = open_fds()
    yield Engine(monkeypatch, tmp_path)
    assert open_fds() <= before


def offer(engine: Engine, make: Callable[[], Any] = Model) -> tuple[Offer, torch.Tensor]:
    """A set of a loaded model, and the weight that it holds."""
    model = make()
    done = way.exported(model)
    sizes = arena_sizes(done.manifest.bytes, HostMemory.granularity, way.ARENA)
    region = HostMemory().reserve(sum(sizes))
    pack(done, region, sizes, keep_private=False)
    body = manifest.decode(manifest.encode(done.manifest))
    fds = region.freeze()
    mapped = HostMemory().map(fds, sizes)
    transport.close_all(fds)
    given = Offer("a-set", "target", "a-group", body, arenas(*sizes), mapped, engine.talk)  # type: ignore[arg-type]
    given.milliseconds = {"connect": 1.0, "receive": 2.0, "map": 3.0}
    return given, next(iter(model.parameters()))


def test_attached(engine: Engine) -> None:
    engine.answer, weight = offer(engine)
    model = engine.load()
    assert engine.inner.loads == 0
    assert torch.equal(model.linear.weight, weight)
    assert not model.training
    report = engine.report
    assert (report.outcome, report.set_id, report.role, report.code) == ("attached", "a-set", "target", "")
    assert (report.tensors, report.arenas, report.mapped_bytes, report.private_bytes) == (1, 1, way.ARENA, 0)
    assert report.milliseconds is not None
    assert {"observe", "collective", "connect", "receive", "map", "build", "bind"} <= set(report.milliseconds)
    assert engine.leases == [(Path("/run/0.sock"), "a-set", "target", engine.talk)]
    assert not engine.talk.closed, "the connection is the lease"
    assert state.process.shares_weights
    assert state.process.resident_bytes == {"target": way.ARENA}
    assert state.process.rebuilt["target"].paths["linear"] is model.linear
    assert engine.loader is not None
    assert engine.loader.preloaded_weights_bytes == way.ARENA


def test_nothing_is_collected_while_the_model_is_built(engine: Engine) -> None:
    """A full collection among SGLang's objects takes tenths of a second."""
    engine.answer, _ = offer(engine)
    assert gc.isenabled()
    engine.load()
    assert engine.collecting == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (AgentUnavailable("gone"), "no-agent"),
        (Empty("nothing"), "empty"),
        (RuntimeError("surprise"), "internal"),
    ],
)
def test_disk(engine: Engine, answer: Exception, code: str) -> None:
    engine.answer = answer
    model = engine.load()
    assert engine.inner.loads == 1
    assert not state.process.shares_weights
    assert engine.leases == []
    assert (engine.report.outcome, engine.report.code) == ("disk", code)
    assert str(answer) in engine.report.message
    model.linear.weight.data.zero_()


def test_a_mismatch_is_reported_with_its_fields(engine: Engine) -> None:
    mismatch = Mismatch("it differs")
    mismatch.differences = diff(fingerprint(dtype="a"), fingerprint(dtype="b"))
    engine.answer = mismatch
    engine.load()
    assert engine.report.outcome == "disk"
    assert engine.report.differences == mismatch.differences


def test_a_mismatch_without_room_is_refused_with_numbers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(engine.config.model_path) / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(HostMemory, "free_bytes", lambda self: 999)
    engine.answer = Mismatch("it differs")
    with pytest.raises(NoRoom, match="start with --wcache-on-mismatch evict"):
        engine.load()
    assert engine.inner.loads == 0
    assert (engine.report.outcome, engine.report.code) == ("refused", "no-room")


def test_room_for_this_ranks_share_is_enough(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(engine.config.model_path) / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(HostMemory, "free_bytes", lambda self: 999)
    monkeypatch.setattr(adapter, "parallel", lambda: topology(tp_size=2))
    engine.answer = Mismatch("it differs")
    engine.load()
    assert engine.report.outcome == "disk"


@pytest.mark.parametrize("error", [OSError("stale"), WeightcacheError("no device")])
def test_not_knowing_the_room_keeps_no_rank_from_voting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(adapter, "checkpoint_directory", fail)
    engine.answer = Mismatch("it differs")
    engine.load()
    assert engine.report.outcome == "disk"


def test_error_mode_refuses(engine: Engine) -> None:
    engine.answer = Mismatch("it differs")
    with pytest.raises(Mismatch):
        engine.load(on_mismatch="error")
    assert engine.inner.loads == 0
    assert (engine.report.outcome, engine.report.code) == ("refused", "mismatch")


def test_the_launcher_decided_for_disk(engine: Engine) -> None:
    engine.load(on_mismatch="error", from_disk="the agent is busy")
    assert engine.asked == []
    assert (engine.report.outcome, engine.report.message) == ("disk", "the agent is busy")


def test_an_option_that_cannot_be_served(engine: Engine) -> None:
    engine.runner.server_args.enable_eplb = True
    engine.load()
    assert engine.asked == []
    assert "weightcache cannot serve with --enable-eplb" in engine.report.message


def test_a_loader_that_is_not_supported(engine: Engine) -> None:
    class BitsAndBytesModelLoader(DefaultModelLoader):
        pass

    engine.inner = BitsAndBytesModelLoader(Model, [])
    engine.load()
    assert engine.asked == []
    assert engine.report.code == UnsupportedMethod.code
    assert engine.inner.loads == 1


@pytest.mark.parametrize("other", [Vote.DISK, Vote.DONATE])
def test_one_rank_that_cannot_attach_means_none_does(engine: Engine, other: Vote) -> None:
    engine.answer, _ = offer(engine)
    engine.others = [other]
    engine.load()
    assert engine.inner.loads == 1
    assert engine.talk.closed
    assert engine.leases == []
    assert not state.process.shares_weights
    assert engine.report.outcome == "disk"
    assert engine.report.message == "rank 1 could not attach, so no rank does"


def test_one_rank_that_refuses_means_all_do(engine: Engine) -> None:
    engine.answer, _ = offer(engine)
    engine.others = [Vote.REFUSE]
    with pytest.raises(AttachFailed, match="rank 1 could not attach"):
        engine.load()
    assert engine.talk.closed
    assert engine.report.outcome == "refused"


def test_explain_stops_after_the_decision(engine: Engine) -> None:
    engine.answer, _ = offer(engine)
    with pytest.raises(SystemExit) as caught:
        engine.load(explain=True)
    assert caught.value.code == 0
    assert engine.inner.loads == 0
    assert engine.talk.closed
    assert engine.report.outcome == "explained"


@pytest.mark.parametrize("stage", ["private", "build", "bind", "surprise"])
def test_a_failure_after_the_decision_ends_the_process_and_says_so(
    engine: Engine, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer, _ = offer(engine)

    def fail(*args: Any) -> Any:
        raise RuntimeError("surprise") if stage == "surprise" else AttachFailed(f"{stage} failed")

    match stage:
        case "private":
            monkeypatch.setattr(serve, "copy_private", fail)
        case "bind":
            monkeypatch.setattr(serve, "rebuild", fail)
        case _:
            monkeypatch.setattr(adapter, "build_on_meta", fail)
    with pytest.raises((AttachFailed, RuntimeError)):
        engine.load()
    assert engine.inner.loads == 0, "the meta build may have poisoned SGLang's caches"
    assert engine.talk.closed
    assert engine.leases == []
    assert not state.process.shares_weights
    assert (engine.report.outcome, engine.report.code) == ("failed", "attach-failed")


@pytest.mark.parametrize("works", [True, False])
def test_donation(engine: Engine, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    invitation = Invitation("a-token", engine.talk)  # type: ignore[arg-type]
    engine.answer = invitation
    produced = SimpleNamespace(
        set_id="a-set",
        region=object(),
        milliseconds={"pack": 3.0},
        arenas=arenas(way.ARENA),
        manifest=SimpleNamespace(tensors=(1, 2), private_bytes=7),
    )
    tokens: list[str] = []

    def donate(load: Any, inner: Any, *args: Any) -> Donation:
        tokens.extend(args[4:6])
        return Donation(load(), produced if works else None, None if works else ExportRefused("no"))  # type: ignore[arg-type]

    monkeypatch.setattr(serve, "donate", donate)
    engine.load(donate=True)
    assert engine.inner.loads == 1
    assert tokens == ["a-token", engine.loader.directive.group]  # type: ignore[union-attr]
    assert engine.talk.closed is not works
    assert engine.report.outcome == ("donated" if works else "disk")
    if works:
        assert engine.leases == [(Path("/run/0.sock"), "a-set", "target", engine.talk)]
        assert state.process.shares_weights
        assert (engine.report.tensors, engine.report.private_bytes) == (2, 7)
    else:
        assert engine.report.code == "export-refused"
        assert engine.leases == []


@pytest.mark.parametrize("mode", ["fallback", "error"])
def test_ranks_of_different_loads_are_not_mixed(engine: Engine, mode: str) -> None:
    engine.answer, _ = offer(engine)
    engine.apart = True
    if mode == "error":
        with pytest.raises(AttachFailed):
            engine.load(on_mismatch=mode)
    else:
        engine.load(on_mismatch=mode)
    assert engine.inner.loads == (mode == "fallback")
    assert engine.talk.closed
    assert engine.report.outcome == ("disk" if mode == "fallback" else "refused")
    assert "rank 1 holds weights of another load than rank 0" in engine.report.message


def test_a_draft_of_a_pipeline_is_loaded_without_a_vote(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last stage builds it: the others would never come to the vote."""
    monkeypatch.setattr(adapter, "parallel", lambda: topology(pp_size=2))
    monkeypatch.setattr(serve, "agree", lambda *_: pytest.fail("a vote"))
    engine.config.is_draft_model = True
    engine.load()
    assert engine.inner.loads == 1
    assert (engine.report.outcome, engine.report.code) == ("disk", "unsupported")


def test_an_invitation_that_other_ranks_did_not_get_is_declined(engine: Engine) -> None:
    engine.answer = Invitation("a-token", engine.talk)  # type: ignore[arg-type]
    engine.others = [Vote.ATTACH]
    engine.load(donate=True)
    assert engine.talk.closed
    assert engine.report.outcome == "disk"


def test_everything_else_is_sglangs_own_loader(engine: Engine) -> None:
    loader = ServingLoader(engine.inner, engine.runner, directive())
    assert loader.some_attribute == "inner"
    with pytest.raises(AttributeError):
        loader.none  # noqa: B018
    with pytest.raises(AttributeError):
        object.__new__(ServingLoader).inner  # noqa: B018
    with contextlib.suppress(Exception):
        import copy

        copy.copy(loader)


def test_devices() -> None:
    assert serve.device_of(DEVICE) == torch.device("cpu")
