"""The main job on a GPU, with a real SGLang: load, keep, attach, share, survive, donate. One story, in order.

Run with $WEIGHTCACHE_MODEL set to a checkpoint (docs/development.md says how to make one on a GPU machine). Figures go
to the output, and to $WEIGHTCACHE_FIGURES as JSON. WEIGHTCACHE_RIG=host runs the same story on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.gpu import rig
from tests.gpu.rig import MIB, Agent, Figures
from tests.support import pagecache
from tests.support.engine import Engine

pytestmark = pytest.mark.skipif(not os.environ.get("WEIGHTCACHE_MODEL"), reason="needs WEIGHTCACHE_MODEL, a checkpoint")


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))


@pytest.fixture(scope="module")
def baseline() -> int:
    """Device use before anything started."""
    return rig.device_used()


@pytest.fixture(scope="module")
def disk(directory: Path, figures: Figures, baseline: int) -> dict[str, object]:
    """A plain engine: what everything else is compared with."""
    made = rig.engine(directory / "disk.log", "--weight-cache-mode", "off")
    with rig.serving(made) as started:
        figures.note("disk: start to first token, s", started.first_token)
        result = {
            "answers": rig.answers(made),
            "pool": rig.pool_tokens(made),
            "reserved": rig.reserved_bytes(made),
        }
        figures.note("disk: KV pool, tokens", result["pool"])
        figures.note("disk: weight memory by SGLang's count, bytes", result["reserved"])
    return result


def test_warm(directory: Path) -> None:
    """Fills the compilers' caches on a fresh machine; deselect it (-k "not warm") where they are warm."""
    made = rig.engine(directory / "warm.log", "--weight-cache-mode", "off")
    with rig.serving(made, timeout=560) as started:
        print(f"warm-up: start to first token {started.first_token} s")


@pytest.fixture(scope="module")
def agent(directory: Path, disk: dict[str, object]) -> Iterator[Agent]:
    started = Agent(directory, model=True).start()
    yield started
    started.stop()


def test_load_publishes_and_leaves_only_the_arenas(agent: Agent, figures: Figures, baseline: int) -> None:
    with rig.PeakWatch() as watch:
        begin = time.monotonic()
        rig.wcache(agent, "load", "--wait", "400")
        figures.note("weightcache: load to ready, s", round(time.monotonic() - begin, 2))
    held = agent.status()["sets"][0]
    arenas = held["bytes"]
    begin = time.monotonic()
    rig.wait_for(lambda: not rig.process_used(), 30, "the loader's CUDA context to be gone")
    figures.note("weightcache: loader gone after ready, s", round(time.monotonic() - begin, 2))
    idle = rig.device_used()
    rss = psutil.Process(agent.pid).memory_info().rss
    figures.note("weightcache: the loader's own load, s", held["load_seconds"])
    figures.note("weightcache: tensors", held["tensors"])
    figures.note("weightcache: arenas", held["arenas"])
    figures.note("weightcache: arena bytes", arenas)
    figures.note("weightcache: resident part, host RSS in MB", round(rss / 1e6, 1))
    assert rss < 30e6
    if rig.profile().backend == "cuda":
        beside = round((idle - baseline - arenas) / MIB, 1)
        figures.note("weightcache: idle device memory beside the arenas, MiB", beside)
        figures.note("weightcache: peak while loading above idle, MiB", round((watch.peak - idle) / MIB))
        # What the driver adds for page tables of the mappings is gone with the loader; allow its rounding only.
        assert idle - baseline - arenas <= 32 * MIB
        # The shard (idle), one arena, the largest storage (the embedding), and the loader's own CUDA context.
        assert watch.peak - idle <= 1024 * MIB + 151936 * 4096 * 2 + 1024 * MIB


def test_the_set_verifies(agent: Agent, figures: Figures) -> None:
    out = rig.wcache(agent, "attach", "--check", "--json").stdout
    figures.note("weightcache: attach --check", out.strip())
    assert '"ok"' in out


def test_fifty_short_lived_attaches_leave_nothing_behind(agent: Agent, figures: Figures) -> None:
    """Light children that map the set with a lease and end: by themselves, by SIGKILL, or unmapping first."""
    used = rig.device_used()
    argv = [sys.executable, "-m", "tests.bench.synthetic", "churn", "--lease", "--backend", rig.profile().backend]
    argv += ["--count", "50", "--socket", str(agent.directory / "0.status.sock")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300, env=rig.variables())
    figures.note("fifty short-lived attaches", done.stdout.strip())
    assert agent.log.read_text(errors="replace").count("leased to") >= 50
    rig.wait_for(lambda: not _all_leases(agent), 10, "the children's leases to end")
    if rig.profile().backend == "cuda":
        rig.wait_for(lambda: abs(rig.device_used() - used) < 16 * MIB, 20, "free memory to be what it was")


def test_two_engines_attach_and_survive_the_agent(
    agent: Agent, directory: Path, disk: dict[str, object], figures: Figures
) -> None:
    first = rig.engine(directory / "attach1.log", directory=directory)
    second = rig.engine(directory / "attach2.log", directory=directory, extra=rig.profile().fast)
    with rig.serving(first) as started:
        figures.note("attached: start to first token, s", started.first_token)
        steps = rig.milliseconds(first)
        figures.note("attached: steps, ms", steps)
        figures.note(
            "attached: receive + map + private copies + bind, ms",
            round(sum(steps[step] for step in ("receive", "map", "private", "bind")), 2),
        )
        whole = sum(steps[step] for step in ("connect", "receive", "map", "private", "build", "bind"))
        figures.note("attached: the same with the model built, ms", round(whole, 2))
        assert "attached set" in rig.launcher_line(first), rig.launcher_line(first)
        assert rig.answers(first) == disk["answers"]
        _check_pool(figures, "attached", first, disk, agent.status()["sets"][0]["bytes"])
        with rig.serving(second) as also:
            figures.note("second engine attached: start to first token, s", also.first_token)
            assert rig.answers(second) == disk["answers"]
            assert len(agent.leases()) == 2
            _what_an_operator_sees(agent, figures)
            _kill_agent_while_serving(agent, first, second, disk, figures)
        rig.wait_for(lambda: len(_all_leases(agent)) == 1, 10, "the second engine's lease to end")
        _refuses_updates(first, disk)
    rig.wait_for(lambda: not _all_leases(agent), 10, "the first engine's lease to end")


def _what_an_operator_sees(agent: Agent, figures: Figures) -> None:
    """wcache-top says whose the device's memory is; nothing of it is counted twice, and little belongs to nobody."""
    seen = json.loads(rig.top(agent, "--json"))
    uuid = "" if rig.profile().backend == "host" else rig.gpu_uuid()
    (device,) = [device for device in seen["devices"] if device["uuid"] == uuid]
    weights = sum(entry["bytes"] for entry in seen["ranks"][0]["sets"])
    own = {process["pid"]: process["bytes"] for process in device["processes"]}
    engines = [engine["pid"] for engine in seen["engines"]]
    rest = device["used"] - weights - sum(own[pid] for pid in engines)
    parts = {"weights": weights, **{f"engine {n}": own[pid] for n, pid in enumerate(engines, 1)}, "others": rest}
    figures.note("wcache-top: device memory, MiB", {name: round(size / MIB) for name, size in parts.items()})
    assert weights == agent.status()["sets"][0]["bytes"]
    assert sorted(engines) == sorted(agent.leases())
    if rig.profile().backend == "cuda":
        assert all(own[pid] > 100 * MIB for pid in engines)
        # Were the mapped arenas among an engine's own bytes, the parts would be more than what is in use.
        assert 0 <= rest < 2048 * MIB


@pytest.mark.skipif(rig.gpu_count() < 2, reason="needs two GPUs")
def test_an_engine_finds_its_agent_by_uuid(
    agent: Agent, directory: Path, disk: dict[str, object], figures: Figures
) -> None:
    """With the visible devices swapped, ordinal 1 is the GPU that the agent serves, and ordinal 0 is not."""
    if not agent.status()["sets"]:
        rig.wcache(agent, "load", "--wait", "400")
    swapped = rig.engine(
        directory / "swapped.log", directory=directory, extra=("--base-gpu-id", "1", *rig.profile().fast)
    )
    swapped.environment["CUDA_VISIBLE_DEVICES"] = "1,0"
    with rig.serving(swapped):
        figures.note("devices swapped: the launcher says", rig.launcher_line(swapped))
        assert "attached set" in rig.launcher_line(swapped), rig.launcher_line(swapped)
        assert rig.answers(swapped) == disk["answers"]


def _kill_agent_while_serving(
    agent: Agent, first: Engine, second: Engine, disk: dict[str, object], figures: Figures
) -> None:
    """The flagship: the weights outlive their agent, nobody reads the disk, and the engines do not notice."""
    used, before = rig.device_used(), agent.status()["sets"][0]
    weights = sorted(rig.profile().model.glob("*.safetensors"))
    pagecache.drop(weights)
    times = []
    for _ in range(3):
        found = agent.rescue()
        assert found["intact"]
        assert found["set_id"] == before["id"]
        times.append(found["answered_ms"])
    figures.note("agent SIGKILLed: milliseconds until another process has the tensors again", times)
    assert min(times) < 1000
    rig.wait_for(lambda: len(_all_leases(agent)) == 2, 20, "both leases to be renewed")
    read = pagecache.resident(weights)
    figures.note("agent SIGKILLed: bytes of the checkpoint read since", read)
    assert read == 0
    assert agent.status()["sets"][0]["id"] == before["id"]
    assert agent.log.read_text(errors="replace").count("load begins") == 1
    for engine in (first, second):
        assert rig.answers(engine) == disk["answers"]
    time.sleep(6)  # SGLang's own cache kills its clients within five seconds of its daemon's death
    assert rig.answers(first) == disk["answers"]
    if rig.profile().backend == "cuda":
        assert abs(rig.device_used() - used) < 64 * MIB
        figures.note("who has files of the driver open", rig.with_device_files())


def _all_leases(agent: Agent) -> list[int]:
    status = agent.status()
    return [lease["pid"] for entry in (*status["sets"], {"leases": status["orphans"]}) for lease in entry["leases"]]


def _refuses_updates(made: Engine, disk: dict[str, object]) -> None:
    status, body = made.post("/update_weights_from_disk", {"model_path": str(rig.profile().model)})
    assert status == 400, body
    assert body["success"] is False, body
    status, body = made.post("/weights_checker", {"action": "reset_tensors"})
    assert body["success"] is False, body
    assert rig.answers(made) == disk["answers"]


def _check_pool(figures: Figures, name: str, made: Engine, disk: dict[str, object], arenas: int) -> None:
    """|difference| <= |arenas + private copies - the disk load's weight memory| / bytes per token, plus rounding."""
    pool, private = rig.pool_tokens(made), rig.private_bytes(made)
    if rig.profile().backend != "cuda":
        return  # the CPU engines of the dry run pin their pool
    per_token = 2 * 36 * 8 * 128 * 2  # K and V, layers, KV heads, head dimension, bf16: the shape make_large writes
    reserved = int(str(disk["reserved"]))
    bound = abs(arenas + private - reserved) / per_token
    difference = pool - int(str(disk["pool"]))
    figures.note(f"{name}: KV pool, tokens", pool)
    terms = f"{difference} tokens, |{arenas} + {private} - {reserved}| / {per_token} = {bound:.0f} tokens"
    figures.note(f"{name}: difference to disk, and its bound", terms)
    # SGLang prints its own count with two digits: 0.01 GB on either side of the load is part of the bound.
    assert abs(difference) <= bound + 2 * 0.01 * 2**30 / per_token


def test_everything_is_given_back(agent: Agent, baseline: int) -> None:
    """What engines and agents held is free again once all have let go."""
    if agent.status()["sets"]:
        rig.wcache(agent, "drain", "--wait", "20")
    if rig.profile().backend == "cuda":
        rig.wait_for(lambda: rig.device_used() - baseline < 64 * MIB, 20, "free memory to be back")
    rig.wcache(agent, "resume")


def test_donation_and_attach_to_it(agent: Agent, directory: Path, disk: dict[str, object], figures: Figures) -> None:
    agent.stop()
    empty = Agent(directory, model=False).start()
    try:
        donor = rig.engine(directory / "donor.log", directory=directory)
        with rig.serving(donor) as started:
            figures.note("donated: start to first token, s", started.first_token)
            figures.note("donated: steps, ms", rig.milliseconds(donor))
            assert "donated set" in rig.launcher_line(donor), rig.launcher_line(donor)
            assert rig.answers(donor) == disk["answers"]
            held = empty.status()["sets"][0]
            _check_pool(figures, "donated", donor, disk, held["bytes"])
            for process in donor.schedulers():
                os.kill(process.pid, signal.SIGKILL)
        if rig.profile().backend == "cuda":
            rig.wait_for(lambda: not rig.process_used(), 20, "the donor to be gone")
            figures.note("donated: device memory after the donor's death, MiB", round(rig.device_used() / MIB))
        heir = rig.engine(directory / "heir.log", directory=directory, extra=rig.profile().fast)
        with rig.serving(heir) as started:
            figures.note("attached to the donated set: start to first token, s", started.first_token)
            assert "attached set" in rig.launcher_line(heir), rig.launcher_line(heir)
            assert rig.answers(heir) == disk["answers"]
        rig.wcache(empty, "evict")
        assert empty.status()["state"] == "empty"
    finally:
        empty.stop()
        agent.start()
