"""A rank in a slot: its lock, the fence, its memory, its beat; and which engines may not be in a slot."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.support.agent import eventually
from tests.support.slot import MAIN, SlotLauncher
from tests.unit.engine.test_slot_channel import ends_threads_only
from weightcache.engine import adapter_kv, hooking, parked_kv, slot, slot_rank, slot_server
from weightcache.engine.directive import Decision, Directive
from weightcache.engine.slot_rank import SlotRank
from weightcache.errors import UsageError, WeightcacheError
from weightcache.standby import fence
from weightcache.standby.locks import ByteLock, is_taken
from weightcache.standby.messages import Process, Ready, Slot

SECONDS = 10.0


@dataclass
class Memory:
    """Says what was done."""

    done: list[str] = field(default_factory=list)
    fails: bool = False
    unfit: str = ""
    seconds: float = -1.0

    def check(self, scheduler: Any) -> None:
        if self.unfit:
            raise UsageError(self.unfit)
        self.done.append(f"check {scheduler.tp_worker.model_runner}")

    def prove(self) -> None:
        if self.unfit:
            raise WeightcacheError(self.unfit)

    def map(self, seconds: float) -> None:
        if self.fails:
            raise WeightcacheError("no memory")
        self.seconds = seconds
        self.done.append("map")

    def unmap(self) -> None:
        self.done.append("unmap")


@dataclass
class Here:
    """A rank that joined."""

    rank: SlotRank
    launcher: SlotLauncher
    lock: Path
    memory: Memory


def scheduler(tp_rank: int = 1, replica: int = 0, **arguments: Any) -> Any:
    """As much of SGLang's as is asked."""
    topology = SimpleNamespace(pp_rank=0, tp_size=2, tp_rank=tp_rank, dp_rank=replica)
    args = {"tp_size": 2, "pp_size": 1} | arguments
    return SimpleNamespace(ps=topology, server_args=SimpleNamespace(**args))


def directive(folder: Path, **others: Any) -> Directive:
    slot = Slot(str(folder / "channel"), str(folder / "lock"), str(folder / "http"))
    return dataclasses.replace(Directive("engine", "host", {}, "group", slot=slot), **others)


def made(given: Directive, memory: Memory) -> SlotRank:
    assert given.slot is not None
    return SlotRank(given, given.slot, memory)


@pytest.fixture
def here(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    memory = Memory()
    with ends_threads_only(monkeypatch), SlotLauncher(runtime_dir / "channel") as launcher:
        rank = made(directive(runtime_dir), memory)
        assert rank.around_rank_known(lambda _: "known", scheduler()) == "known"
        launcher.wait_joined(1)
        yield Here(rank, launcher, runtime_dir / "lock", memory)
        rank._lock.close()


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that waits."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_owns_and_releases(here: Here) -> None:
    done = here.launcher.own(1)
    assert (done.problem, sorted(done.seconds)) == ("", ["fence", "lock", "map"])
    assert (is_taken(here.lock, 2), is_taken(here.lock, 1), here.memory.done) == (True, False, ["map"])
    assert here.launcher.release(1).problem == ""
    assert (is_taken(here.lock, 2), here.memory.done) == (False, ["map", "unmap"])


def test_nothing_is_mapped_while_somebody_may_still_write(
    here: Here, sleeper: Callable[[], subprocess.Popen[bytes]]
) -> None:
    old = fence.identify(sleeper().pid)
    assert here.launcher.own(1, [old], 0.2).problem == f"may still write KV memory after 0.2 s: {old.pid}"
    assert here.memory.done == []
    assert not is_taken(here.lock, 2)
    os.kill(old.pid, 9)
    assert here.launcher.own(1, [old, Process(1, 12345)]).problem == ""


def test_a_lock_that_is_not_free(here: Here) -> None:
    other = ByteLock(here.lock, 2)
    other.take()
    try:
        assert "byte 2" in here.launcher.own(1, seconds=0.2).problem
        assert here.memory.done == []
    finally:
        other.close()


def test_the_order_says_how_long_all_of_it_may_take(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(processes: Sequence[Process], seconds: float) -> tuple[Process, ...]:
        waited.append(seconds)
        return ()

    monkeypatch.setattr(slot_rank.fence, "wait", wait)
    assert here.launcher.own(1, (), 500.0).problem == ""
    assert 400.0 < here.memory.seconds <= waited[0] <= 500.0


def test_memory_that_is_not_there_gives_the_lock_back(here: Here) -> None:
    here.memory.fails = True
    assert here.launcher.own(1).problem == "no memory"
    assert not is_taken(here.lock, 2)


def test_a_beat_a_second_and_the_loop_goes_on(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(slot_rank.time, "monotonic", lambda: now[0])
    for _ in range(25):
        assert here.rank.around_input(lambda *args: args, "scheduler", ["request"]) == ("scheduler", ["request"])
        now[0] += 0.1
    monkeypatch.undo()
    here.rank.ready()
    here.launcher.wait_ready([1], SECONDS)
    assert here.launcher.beats.total() == 3


@contextlib.contextmanager
def event_loop(rank: SlotRank) -> Iterator[list[int]]:
    """Goes round as SGLang's does; how often."""
    rounds, over = [0], threading.Event()

    def run() -> None:
        while not over.is_set():
            rank.around_input(lambda: rounds.__setitem__(0, rounds[0] + 1))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
    finally:
        over.set()
        thread.join(SECONDS)


@pytest.mark.parametrize("fails", [False, True])
def test_the_event_loop_rests_while_memory_comes_and_beats(
    here: Here, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(slot_rank, "BEAT_SECONDS", 0.05)
    seen: list[int] = []

    def mapping(seconds: float) -> None:
        time.sleep(0.1)  # whatever round it was in has ended
        before = rounds[0]
        time.sleep(0.5)
        seen.append(rounds[0] - before)
        if fails:
            raise WeightcacheError("no memory")

    monkeypatch.setattr(here.memory, "map", mapping)
    with event_loop(here.rank) as rounds:
        before = here.launcher.beats[1]
        assert here.launcher.own(1).problem == ("no memory" if fails else "")
        after = rounds[0]
        assert seen == [0]
        assert here.launcher.beats[1] - before >= 3
        assert eventually(lambda: rounds[0] > after + 10, SECONDS)


def test_without_memory_the_event_loop_goes_round_seldom(here: Here) -> None:
    def in_half_a_second() -> int:
        before = rounds[0]
        time.sleep(0.5)
        return rounds[0] - before

    with event_loop(here.rank) as rounds:
        assert 0 < in_half_a_second() <= 26
        assert here.launcher.own(1).problem == ""
        assert in_half_a_second() > 100
        assert here.launcher.release(1).problem == ""
        assert 0 < in_half_a_second() <= 26


def test_memory_that_stands_for_nothing_ends_the_rank(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(why: str) -> NoReturn:
        raise SystemExit(why)

    here.memory.unfit = "no KV memory that can be given back"
    with monkeypatch.context() as patch:
        patch.setattr(slot_rank.slot_channel, "end", end)
        with pytest.raises(SystemExit, match="no KV memory"):
            here.rank.ready()
    here.memory.unfit = ""
    here.rank.ready()
    here.launcher.wait_ready([1], SECONDS)
    assert here.launcher.said[1].count(Ready()) == 1


def test_a_process_that_is_no_rank_says_nothing(runtime_dir: Path) -> None:
    rank = made(directive(runtime_dir), Memory())
    rank.ready()
    assert rank.around_input(lambda x: x, 1) == 1


def test_ranks_of_replicas_are_counted_on(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ends_threads_only(monkeypatch), SlotLauncher(runtime_dir / "channel") as launcher:
        rank = made(directive(runtime_dir), Memory())
        rank.around_rank_known(lambda _: None, scheduler(tp_rank=1, replica=2))
        launcher.wait_joined(5)
        rank._lock.close()


def hold(path: str, ready: Any, until: Any) -> None:
    """A forked child, as SGLang's processors of images are."""
    ready.set()
    until.wait(SECONDS)


def test_a_forked_child_does_not_keep_the_lock(here: Here) -> None:
    assert here.launcher.own(1).problem == ""
    context = multiprocessing.get_context("fork")
    ready, until = context.Event(), context.Event()
    child = context.Process(target=hold, args=(str(here.lock), ready, until))
    child.start()
    try:
        assert ready.wait(SECONDS)
        here.rank._lock.close()  # as the end of this process would
        assert not is_taken(here.lock, 2)
        assert child.is_alive()
    finally:
        until.set()
        child.join(SECONDS)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"tokenizer_worker_num": 4}, "--tokenizer-worker-num in a slot: its HTTP workers"),
        ({"enable_http2": True}, "--enable-http2 in a slot"),
        ({"grpc_port": 40000}, "--grpc-port in a slot"),
        ({"kv_events_config": '{"publisher": "zmq"}'}, "--kv-events-config in a slot"),
        ({"load_publish_endpoint": "auto"}, "--load-publish-endpoint in a slot"),
        ({"gated_launch_port": 40000}, "--gated-launch-port in a slot"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode in a slot"),
        ({"enable_dp_attention": True}, "--enable-dp-attention in a slot"),
        ({"nnodes": 2}, "--nnodes in a slot"),
        ({"warmups": "compile-audio"}, "--warmups in a slot: what they compute needs KV memory"),
    ],
)
def test_an_engine_that_cannot_be_in_a_slot_loads_nothing(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, why: str
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(slot_rank.directives, "send_report", lambda _, report: sent.append(report))
    rank = made(directive(runtime_dir), Memory())
    with pytest.raises(UsageError, match=why):
        rank.around_rank_known(lambda _: pytest.fail("it must end here"), scheduler(**arguments))
    (decision,) = sent
    assert isinstance(decision, Decision)
    assert (decision.rank, decision.outcome) == (1, "refused")
    assert why in decision.message


def test_kv_memory_that_cannot_come_and_go_is_refused_before_there_is_any(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(slot_rank.directives, "send_report", lambda _, report: sent.append(report))
    monkeypatch.setattr(slot_rank.sglang, "global_rank_of", lambda _: 1)
    memory = Memory()
    rank = made(directive(runtime_dir), memory)
    loaded = SimpleNamespace(tp_worker=SimpleNamespace(model_runner="the model"))
    rank.before_pools(loaded)
    assert memory.done == ["check the model"]
    memory.unfit = "which does not work yet with latent attention (MLA)"
    with pytest.raises(UsageError, match="latent attention"):
        rank.before_pools(loaded)
    (decision,) = sent
    assert (decision.rank, decision.outcome) == (1, "refused")
    assert "latent attention" in decision.message


def test_the_rust_server_cannot_be_in_a_slot(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(UsageError, match="SGLANG_RUST_SERVER"):
        made(directive(runtime_dir), Memory()).around_rank_known(lambda _: None, scheduler())


@pytest.fixture
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "_server", [])
    monkeypatch.setattr(slot, "_rank", [])


def test_a_main_process_that_cannot_join_ends_with_a_sentence(runtime_dir: Path, nothing_joined: None) -> None:
    with pytest.raises(SystemExit, match="weightcache: no launcher takes this process"):
        slot.join(directive(runtime_dir))


def test_a_main_process_whose_hooks_did_not_take_ends_with_a_sentence(
    runtime_dir: Path, nothing_joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooking, "missing", lambda targets: sorted(targets))
    slot.prove(["uvicorn"])  # in no slot
    with ends_threads_only(monkeypatch), SlotLauncher(runtime_dir / "channel") as launcher:
        slot.join(directive(runtime_dir))
        launcher.wait_joined(MAIN)
        assert isinstance(slot.server(), slot_server.SlotServer)
        with pytest.raises(SystemExit, match="does not let an engine in a slot hook _wait_and_warmup, uvicorn"):
            slot.prove(["uvicorn", "_wait_and_warmup"])


def test_without_a_slot_nothing_is_registered(runtime_dir: Path, nothing_joined: None) -> None:
    for given in (directive(runtime_dir, slot=None), directive(runtime_dir, purpose="loader")):
        slot.join(given)
        assert slot.rank_hooks(given) == {}
        slot.rank_ready()
    assert slot.server() is None
    assert len(slot.rank_hooks(directive(runtime_dir))) == 2


@pytest.mark.parametrize("unproven", [False, True])
def test_on_a_gpu_kv_memory_is_parked(runtime_dir: Path, nothing_joined: None, unproven: bool) -> None:
    given = directive(runtime_dir)
    assert given.slot is not None
    given = replace(given, backend="cuda", slot=replace(given.slot, unproven=unproven))
    hooks = slot.rank_hooks(given)
    assert {adapter_kv.PROFILE_BYTES, adapter_kv.MAKE_LATENT, adapter_kv.MAKE_STATES} < set(hooks)
    (rank,) = slot._rank
    memory = rank._memory
    assert isinstance(memory, parked_kv.ParkedMemory)
    assert memory._unproven is unproven
