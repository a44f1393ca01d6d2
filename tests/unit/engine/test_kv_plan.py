"""The bytes of KV memory that both slots of an engine go by, and who measures them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcache.engine import adapter, adapter_kv, kv_plan
from weightcache.errors import WeightcacheError
from weightcache.standby.locks import ByteLock

KEY = ["model_path=m"]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(adapter, "world", lambda: (0, 1, None))
    return tmp_path / "engine.plan", tmp_path / "engine.lock"


def measured(size: int, calls: list[int]) -> Any:
    def measure() -> int:
        calls.append(size)
        return size

    return measure


def test_the_first_engine_measures_and_the_others_go_by_it(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    assert kv_plan.planned(*paths, KEY, measured(1000, calls)) == 1000
    assert kv_plan.planned(*paths, KEY, measured(5, calls)) == 1000
    assert calls == [1000]


def test_other_arguments_are_measured_unless_there_is_an_active_engine(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    kv_plan.planned(*paths, KEY, measured(1000, calls))
    active = ByteLock(paths[1], 0)
    active.take()
    assert kv_plan.planned(*paths, ["model_path=other"], measured(5, calls)) == 1000
    active.close()
    assert kv_plan.planned(*paths, ["model_path=other"], measured(2000, calls)) == 2000
    assert calls == [1000, 2000]


def test_nothing_is_measured_beside_an_active_engine(paths: tuple[Path, Path]) -> None:
    calls: list[int] = []
    active = ByteLock(paths[1], 0)
    active.take()
    with pytest.raises(WeightcacheError, match="stop that one, or set kv_gigabytes"):
        kv_plan.planned(*paths, KEY, measured(5, calls))
    active.close()
    assert calls == []


def test_what_was_measured_while_an_engine_became_active_is_no_plan(paths: tuple[Path, Path]) -> None:
    active = ByteLock(paths[1], 0)

    def measure() -> int:
        active.take()
        return 5

    with pytest.raises(WeightcacheError, match="beside an active engine"):
        kv_plan.planned(*paths, KEY, measure)
    active.close()
    assert not paths[0].exists()


def test_another_reserve_gpu_file_or_release_is_another_plan(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(adapter, "version", lambda: "0.5.17")
    configurator = SimpleNamespace(gpu_id=3)

    def planned(reserve: int, free: int, engine: str = "its file") -> Any:
        return kv_plan.Plan(*paths, reserve, engine=engine).budget(configurator, lambda: free)

    assert [planned(300, 1000), planned(300, 2000), planned(400, 1000)] == [700, 700, 600]
    device.total_memory = 80 << 30
    assert planned(400, 800) == 400
    assert [planned(400, 900, "another file"), planned(400, 1000, "another file")] == [500, 500]
    monkeypatch.setattr(adapter, "version", lambda: "another one")
    assert planned(400, 1000, "another file") == 600


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"key": 1}', '{"key": ["model_path=m"], "bytes": true}', '{"key": ["model_path=m"], "bytes": -1}'],
)
def test_a_plan_that_makes_no_sense_is_none(paths: tuple[Path, Path], text: str) -> None:
    paths[0].write_text(text)
    assert kv_plan.planned(*paths, KEY, measured(7, [])) == 7
    assert json.loads(paths[0].read_text()) == {"key": KEY, "bytes": 7}


def test_nothing_left_for_kv_memory_is_said(paths: tuple[Path, Path]) -> None:
    with pytest.raises(WeightcacheError, match="no GPU memory is left for KV memory"):
        kv_plan.planned(*paths, KEY, lambda: -3)
    assert not paths[0].exists()


def test_somebody_who_measures_without_an_end(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_plan, "MEASURE_SECONDS", 0.01)
    other = ByteLock(paths[1], kv_plan.PLAN_BYTE)
    other.take()
    with pytest.raises(WeightcacheError, match="does not come to an end"):
        kv_plan.planned(*paths, KEY, measured(7, []))
    other.close()


def test_other_ranks_go_by_the_first_one(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "world", lambda: (1, 2, None))
    told: list[int] = []

    def first(value: int) -> int:
        told.append(value)
        return 1234

    monkeypatch.setattr(adapter_kv, "from_first_rank", first)
    assert kv_plan.planned(*paths, KEY, measured(7, [])) == 1234
    monkeypatch.setattr(adapter_kv, "from_first_rank", lambda _: 0)
    assert kv_plan.planned(*paths, KEY, measured(7, [])) == 7
    assert not paths[0].exists()
    assert told == [0]
    answers = iter((0, 1))
    monkeypatch.setattr(adapter_kv, "from_first_rank", lambda _: next(answers))
    with pytest.raises(WeightcacheError, match="beside an active engine"):
        kv_plan.planned(*paths, KEY, measured(7, []))
