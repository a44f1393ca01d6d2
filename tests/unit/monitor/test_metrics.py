"""What the metrics say of a host."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_classic

from tests.unit.monitor.observed import (
    GPUS,
    NOW,
    STARTED,
    UUID,
    down,
    lease,
    snapshot,
    status,
    up,
    weight_set,
)  # fmt: skip
from weightcache.monitor import gpus, labels, metrics
from weightcache.monitor.families import EVENTS, FAMILIES, LOADS, REFUSALS, STATES
from weightcache.monitor.view import RankView
from weightcache.protocol import Measured
from weightcache.server.journal import MESSAGE_IDS
from weightcache.server.states import State

OF_AGENTS = [family for family in FAMILIES if not family.name.startswith("weightcache_engine_")]
KEY = {"rank": "0", "gpu": "3", "UUID": UUID}


def parsed(*ranks: RankView) -> dict[str, Metric]:
    text, _ = metrics.text(snapshot(*ranks), GPUS)
    return {family.name: family for family in read_openmetrics(text.decode())}


def value(found: dict[str, Metric], series: str, **more: str) -> float | None:
    """The one sample of a series with these labels beside rank 0's."""
    wanted = KEY | more
    got = [
        s.value for f in found.values() for s in f.samples if s.name == series and wanted.items() <= s.labels.items()
    ]
    assert len(got) <= 1, got
    return got[0] if got else None


def labels_of(found: dict[str, Metric], family: str) -> dict[str, str]:
    [sample] = found[family].samples
    return dict(sample.labels)


def test_leases_that_a_report_does_not_name_count() -> None:
    entry = weight_set(leases=(), leases_total=64)
    found = parsed(up(sets=(entry, dataclasses.replace(entry, leases=(lease(1),)))))
    assert value(found, "weightcache_leases", role="target") == 128
    assert value(found, "weightcache_last_lease_timestamp_seconds") == NOW


def test_a_rank_with_everything() -> None:
    found = parsed(up())
    assert value(found, "weightcache_agent_up") == 1
    assert value(found, "weightcache_rank_ready") == 1
    assert value(found, "weightcache_rank_state", state="ready") == 1
    assert value(found, "weightcache_rank_kept", kept="store") == 1
    assert value(found, "weightcache_rank_kept", kept="lost") == 0
    assert value(found, "weightcache_rank_error", code="checkpoint") == 1
    assert value(found, "weightcache_rank_drained_timestamp_seconds") == NOW - 100
    assert value(found, "weightcache_agent_start_time_seconds") == STARTED
    assert value(found, "weightcache_load_progress_bytes") == 5
    assert value(found, "weightcache_load_progress_size_bytes") == 10
    assert value(found, "weightcache_load_progress_seconds") == 2.5
    assert value(found, "weightcache_orphans") == 1
    of = {"role": "target"}
    assert value(found, "weightcache_set_bytes", **of) == 16_400_000_000
    assert value(found, "weightcache_set_load_seconds", **of) == 12.5
    assert value(found, "weightcache_leases", **of) == 1
    assert value(found, "weightcache_events_total", event="leased") == 7
    assert value(found, "weightcache_loads_total", source="donor", result="failed") == 1
    assert value(found, "weightcache_load_duration_seconds_sum", source="loader") == 30
    assert value(found, "weightcache_load_duration_seconds_count", source="loader") == 2
    assert set(found) == {family.name for family in OF_AGENTS}


def test_who_holds_what() -> None:
    found = parsed(up())
    assert labels_of(found, "weightcache_set") == {
        **KEY,
        "role": "target",
        "model": "llama",
        "revision": "0123456789ab",
        "version": "4",
        "digest": "fedcba987654",
    }
    assert labels_of(found, "weightcache_rank") == {
        **KEY,
        "backend": "cuda",
        "version": "0.1.0",
        "pci_bus_id": "00000000:18:00.0",
        "gpu_name": "NVIDIA H200",
    }


def test_sets_of_one_role_are_one_series_and_the_newest_is_described() -> None:
    old = weight_set(version=1, model="old", load_seconds=99.0, leases=(lease(1), lease(2)), suspect="why")
    found = parsed(up(sets=(old, weight_set(), weight_set(role="draft-0", bytes=5))))
    of = {"role": "target"}
    assert value(found, "weightcache_sets", **of) == 2
    assert value(found, "weightcache_set_bytes", **of) == 2 * 16_400_000_000
    assert value(found, "weightcache_leases", **of) == 3
    assert value(found, "weightcache_set_load_seconds", **of) == 12.5
    assert value(found, "weightcache_set_suspect", **of) == 1
    assert value(found, "weightcache_set_bytes", role="draft-0") == 5
    assert {s.labels["model"] for s in found["weightcache_set"].samples} == {"llama"}


def test_an_agent_that_does_not_answer_is_all_that_is_said_of_it() -> None:
    found = parsed(down())
    assert value(found, "weightcache_agent_up") == 0
    assert value(found, "weightcache_rank_ready") == 0
    assert value(found, "weightcache_rank_state", state="down") == 1
    assert value(found, "weightcache_rank_state", state="ready") == 0
    said = {"weightcache_build", "weightcache_rank", "weightcache_agent_up", "weightcache_rank_ready"}
    assert set(found) == said | {"weightcache_rank_state"}


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (up(state="loading"), "loading"),
        (up(state="of-tomorrow"), "unknown"),
        (down(state="stopped"), "stopped"),
        (dataclasses.replace(down(state="unknown"), heard_at=0.0), "stopped"),
        (dataclasses.replace(down(), agent="closed"), "unknown"),
    ],
)
def test_there_is_always_one_state(view: RankView, state: str) -> None:
    samples = parsed(view)["weightcache_rank_state"].samples
    assert {s.labels["state"]: s.value for s in samples} == {known: float(known == state) for known in STATES}


def test_when_an_engine_was_last_attached() -> None:
    name = "weightcache_last_lease_timestamp_seconds"
    assert value(parsed(up()), name) == NOW
    assert value(parsed(up(sets=(weight_set(leases=()),))), name) == NOW - 500
    assert value(parsed(up(sets=())), name) == NOW - 500


def test_attaches_are_a_cumulative_histogram() -> None:
    found = parsed(up())
    buckets = {
        s.labels["le"]: s.value for s in found["weightcache_attach_duration_seconds"].samples if "le" in s.labels
    }
    assert list(buckets.values()) == [0, 2, 7, 8, 8, 8, 8, 8, 8, 8, 8, 9]
    assert list(buckets)[::11] == ["0.001", "+Inf"]
    assert value(found, "weightcache_attach_duration_seconds_count") == 9
    assert value(found, "weightcache_attach_duration_seconds_sum") == 4.5


def test_what_did_not_happen_yet_is_zero_so_that_the_first_time_is_seen() -> None:
    found = parsed(up(counts={}, measured=Measured(STARTED)))
    totals = {s.labels["event"]: s.value for s in found["weightcache_events"].samples if s.name.endswith("_total")}
    assert totals == dict.fromkeys(EVENTS, 0)
    assert sum(s.name.endswith("_total") for s in found["weightcache_loads"].samples) == len(LOADS)


def test_refusals_by_code_and_all_unknown_codes_together() -> None:
    found = parsed(up())
    assert value(found, "weightcache_refusals_total", code="mismatch") == 2
    assert value(found, "weightcache_refusals_total", code="other") == 3
    assert value(found, "weightcache_refusals_total", code="drained") == 0
    assert value(found, "weightcache_verification_failures_total", code="damaged") == 1
    assert set(metrics.CODES) >= set(REFUSALS)


def test_counters_count_since_the_agent_was_started() -> None:
    found = parsed(up())
    for family in OF_AGENTS:
        if family.type in ("counter", "histogram", "summary"):
            created = {s.value for s in found[family.name].samples if s.name.endswith("_created")}
            assert created == {STARTED}, family.name


def test_an_older_agent_tells_less() -> None:
    found = parsed(up(measured=Measured()))
    assert value(found, "weightcache_agent_start_time_seconds") == NOW - 3600
    assert not {"weightcache_attach_duration_seconds", "weightcache_last_lease_timestamp_seconds"} <= set(found)


def test_without_a_gpu_the_labels_are_empty_and_without_ranks_there_is_the_build() -> None:
    found = parsed(up(backend="host", gpu_uuid=""))
    got = labels_of(found, "weightcache_agent_up")
    assert (got["gpu"], got["UUID"]) == ("", "")
    assert set(parsed()) == {"weightcache_build"}


def test_the_format_is_what_the_client_asks_for() -> None:
    seen = snapshot(up())
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    for accept in ("", "*/*", "text/plain", "application/json", "application/openmetrics-tex"):
        text, kind = metrics.text(seen, GPUS, accept)
        assert kind.startswith("text/plain; version=0.0.4")
        assert b"_created" not in text
        assert b"# EOF" not in text
    text, kind = metrics.text(seen, GPUS, prometheus)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")


def test_the_older_format_says_the_same() -> None:
    seen = snapshot(up(), up(rank=1), down(rank=2))
    new, old = (metrics.text(seen, GPUS, accept)[0].decode() for accept in (metrics.OPENMETRICS, "text/plain"))

    def samples(families: object) -> set[object]:
        return {
            (s.name, tuple(sorted(s.labels.items())), s.value)
            for family in families  # type: ignore[attr-defined]
            for s in family.samples
            if not s.name.endswith("_created")
        }

    assert samples(read_openmetrics(new)) == samples(read_classic(old))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("/srv/models/llama", "llama"),
        ("/srv/models/llama/", "llama"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("./models/llama", "llama"),
        ("models/deep/llama", "llama"),
        ("/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
         "meta-llama/Llama-3.1-8B"),
        ("", ""),
        ("/", ""),
        ('/a/evil"} 1\nweightcache_agent_up 1', 'evil"} 1?weightcache_agent_up 1'),
        ("/a/\x1b[31m\ud800", "?[31m?"),
        ("/a/" + "x" * 10_000, "x" * labels.LONGEST),
        ("\N{SNOWMAN}", "\N{SNOWMAN}"),
    ],
)  # fmt: skip
def test_models_are_named_not_located(said: str, shown: str) -> None:
    found = parsed(up(sets=(weight_set(model=said),)))
    assert labels_of(found, "weightcache_set")["model"] == shown
    assert value(found, "weightcache_agent_up") == 1


def test_the_lists_are_the_agents_own() -> None:
    assert {state.value for state in State} < set(STATES)
    assert set(EVENTS) | {"refused", "verification-failed"} == set(MESSAGE_IDS)


def test_gpus_are_numbered_by_their_place_on_the_bus(tmp_path: Path) -> None:
    for bus, uuid in (("0000:9a:00.0", "GPU-b"), ("0000:18:00.0", "GPU-a"), ("0001:00:00.0", "GPU-c")):
        folder = tmp_path / bus
        folder.mkdir()
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
        )
    (tmp_path / "0002:00:00.0").mkdir()
    found = gpus.find(tmp_path)
    assert {uuid: gpu.index for uuid, gpu in found.items()} == {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}
    assert found["GPU-b"] == gpus.Gpu(1, "NVIDIA H200", "00000000:9A:00.0")
    assert gpus.find(tmp_path / "none") == {}


def test_a_status_with_nothing_in_it() -> None:
    blank = status(sets=(), orphans=(), progress=None, error=None, drained=None, counts={}, measured=Measured())
    assert value(parsed(RankView(blank, "up", None, 0.0)), "weightcache_agent_up") == 1


def test_the_agent_knows_nothing_of_metrics() -> None:
    code = "import sys, weightcache.server.__main__; print(*sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    strangers = ("prometheus_client", "pynvml", "psutil", "textual", "weightcache.monitor", "http", "torch")
    assert [name for name in got if name.startswith(strangers)] == []
