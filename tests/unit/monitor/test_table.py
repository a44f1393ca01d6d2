"""The table of `wcache-top --once`: columns, the split of the memory, and strangers' text."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.unit.contracts import strategies
from tests.unit.monitor import made
from weightcache.monitor import table, words
from weightcache.monitor.snapshot import DeviceProcess, Snapshot
from weightcache.text import duration, size

GB = 10**9


def test_a_rank_on_a_gpu() -> None:
    now = time.time()
    users = (DeviceProcess(4711, "sglang::scheduler", 80 * GB), DeviceProcess(99, "python train.py", None))
    leases = (made.lease(since=now - 61),)
    rank = made.on_gpu(sets=(made.weight_set(leases=leases, published_at=now - 7300),), kept="store")
    shown = table.lines(
        made.snapshot(
            rank, at=now, devices=(made.device(made.GPU, *users),), engines=(made.engine(running=3, waiting=1),)
        )
    )
    assert shown[:2] == [
        "RANK  STATE  GPU  MODEL          WEIGHTS  ENGINES    OTHER     FREE  USERS  REQS  KEPT         AGE",
        "   0  ready  0    /models/small  16.4 GB  80.0 GB  23.6 GB  30.0 GB      1   3+1  store  2 h 1 min",
    ]
    assert shown[2].startswith(
        "rank 0: set s1abcd (target, version 1) of /models/small: 213 tensors, 16.4 GB in 1 arena"
    )
    assert shown[3:] == [
        "rank 0:   engine 4711 (root, sglang.service) for 61 s: python -m sglang.launch_server",
        f"rank 0: memory of GPU 0 NVIDIA H200 ({made.GPU}): 16.4 GB weights, 80.0 GB engines besides, 23.6 GB other, "
        "30.0 GB free of 150.0 GB",
        "rank 0: engine 4711 has 80.0 GB besides the weights, 3.00 GB of host memory, 3 requests running, 1 waiting",
        "rank 0: process 99 has an unknown part: python train.py",
    ]


def test_weights_that_no_process_owns() -> None:
    [line] = [
        line
        for line in table.lines(made.snapshot(made.on_gpu(), devices=(made.device(used=17 * GB, free=133 * GB),)))
        if "memory of" in line
    ]
    assert ": 16.4 GB weights, 0 GB engines besides, 0.60 GB other, 133.0 GB free of 150.0 GB" in line


def test_a_rank_in_host_memory() -> None:
    device = made.device("", DeviceProcess(4711, "x", 2 * GB), index=-1, name="host memory")
    rank = made.view(made.status(sets=(made.weight_set(leases=(made.lease(),)),)))
    shown = table.lines(made.snapshot(rank, devices=(device,), engines=(made.engine(),)))
    assert shown[1].split()[2] == "host"
    assert shown[-2].startswith("rank 0: memory of this host: 16.4 GB weights, 2.00 GB engines besides, 101.6 GB")
    assert shown[-1] == "rank 0: engine 4711 has 2.00 GB besides the weights"


def test_what_is_not_known_is_a_dash() -> None:
    rank = made.view(made.status(state="unknown", backend="cuda", model=""), agent="down")
    shown = table.lines(made.snapshot(rank))
    assert shown[1].split() == ["0", "unknown", "(down)", "-", "-", "0", "GB", "-", "-", "-", "0", "-", "-", "-"]
    assert shown[2:] == ["rank 0: agent down, last known 0.0 s ago: "]


def test_a_gpu_that_nvml_does_not_know() -> None:
    device = made.device(total=0, used=0, free=0, index=-1, name="")
    shown = table.lines(made.snapshot(made.on_gpu(), devices=(device,)))
    assert shown[1].split()[2:4] == ["GPU-00000000", "/models/small"]
    assert shown[-1] == f"rank 0: memory of ({made.GPU}): unknown"


def test_a_slice() -> None:
    rank = made.on_gpu(uuid="MIG-01234567-89ab")
    assert table.lines(made.snapshot(rank))[1].split()[2] == "MIG-01234567"


def test_rows_fit_in_120_columns() -> None:
    ranks = [made.on_gpu(rank, model="/srv/models/" + "deep/" * 40 + f"model-{rank}") for rank in range(8)]
    shown = table.lines(made.snapshot(*ranks, devices=(made.device(),)))
    assert max(map(len, shown[:9])) == 120
    assert "  ..." in shown[1]
    assert "/deep/model-7 " in shown[8]


def test_ages_are_told_against_the_snapshot() -> None:
    rank = made.view(made.status(sets=(made.weight_set(published_at=1000.0, leases=(made.lease(since=1030.0),)),)))
    shown = table.lines(made.snapshot(rank, at=1060.0))
    assert shown[1].endswith(" 60 s")
    assert " for 30 s: " in shown[3]


def test_an_engine_of_two_sets_is_one_user() -> None:
    sets = (made.weight_set(leases=(made.lease(),)), made.weight_set(id="d", role="draft-0", leases=(made.lease(),)))
    shown = table.lines(made.snapshot(made.on_gpu(sets=sets), engines=(made.engine(running=2, waiting=0),)))
    assert shown[1].split()[-5:-2] == ["1", "2+0", "process"]


def test_colour_only_where_wanted() -> None:
    found = made.snapshot(made.view(), made.view(made.status(1, "failed")))
    assert "\x1b" not in "".join(table.lines(found))
    shown = table.lines(found, colour=True)
    assert "\x1b[32mready\x1b[0m" in shown[1]
    assert "\x1b[31mfailed\x1b[0m" in shown[2]
    assert set(words.COLOURS.values()) <= {"green", "yellow", "red"}


def test_nothing() -> None:
    assert table.lines(made.snapshot()) == []


@pytest.mark.parametrize("number", [10**18 + 1, 10**400, -(10**400)])
def test_impossible_numbers(number: int) -> None:
    assert size(number) == "an impossible size"
    rank = made.view(made.status(sets=(made.weight_set(bytes=number, leases=(made.lease(since=-1e308),)),)))
    shown = table.lines(made.snapshot(rank, at=1.7e308))
    assert "for an impossible time: " in shown[3]


def test_no_time_at_all() -> None:
    assert [duration(seconds) for seconds in (math.inf, math.nan, -math.inf)] == ["an impossible time"] * 2 + ["0.0 s"]


# Making a smaller example of a whole snapshot takes minutes.
@settings(
    max_examples=50,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(strategies.values(Snapshot))
def test_any_snapshot_is_printable_lines(found: Snapshot) -> None:
    for line in table.lines(found):
        assert line.isprintable()
