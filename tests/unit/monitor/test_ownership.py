"""Who owns a device's memory: the parts always add up, whatever agents and drivers say."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from tests.unit.monitor import made
from weightcache.monitor.ownership import Ownership, ownership
from weightcache.monitor.snapshot import DeviceProcess

GB = 10**9


def of(
    *ranks: object, processes: tuple[DeviceProcess, ...] = (), total: int = 100 * GB, used: int = 60 * GB
) -> Ownership:
    device = made.device(made.GPU, *processes, total=total, used=used, free=total - used)
    return ownership(made.snapshot(*ranks, devices=(device,)), device)  # type: ignore[arg-type]


def weights(size: int = 16 * GB, **changes: object) -> object:
    return made.on_gpu(sets=(made.weight_set(bytes=size, **changes),))


def test_weights_without_a_process() -> None:
    """Parked in the descriptor store: nvidia-smi shows them under nobody."""
    assert of(weights(), used=17 * GB) == Ownership(100 * GB, 16 * GB, 0, 1 * GB, 83 * GB)


def test_engines_have_what_is_theirs_besides() -> None:
    own = of(
        weights(leases=(made.lease(10), made.lease(11))),
        processes=(DeviceProcess(10, "a", 20 * GB), DeviceProcess(11, "b", 5 * GB), DeviceProcess(12, "c", 9 * GB)),
    )
    assert own == Ownership(100 * GB, 16 * GB, 25 * GB, 19 * GB, 40 * GB)


def test_engines_of_sets_that_are_gone_count_too() -> None:
    own = of(made.on_gpu(sets=(), orphans=(made.lease(10),)), processes=(DeviceProcess(10, "a", 20 * GB),))
    assert (own.weights, own.engines, own.other) == (0, 20 * GB, 40 * GB)


def test_what_nobody_may_know_is_other() -> None:
    own = of(weights(leases=(made.lease(10),)), processes=(DeviceProcess(10, "a", None),))
    assert (own.engines, own.other) == (0, 44 * GB)


def test_other_ranks_are_not_counted() -> None:
    own = of(weights(), made.on_gpu(1, "GPU-another", sets=(made.weight_set(),)), made.view())
    assert own.weights == 16 * GB


def test_an_agent_that_is_down_still_holds() -> None:
    assert of(made.view(weights().status, agent="down")).weights == 16 * GB  # type: ignore[attr-defined]


def test_more_than_there_is_is_cut() -> None:
    own = of(weights(200 * GB, leases=(made.lease(10),)), processes=(DeviceProcess(10, "a", 50 * GB),), used=60 * GB)
    assert own == Ownership(100 * GB, 60 * GB, 0, 0, 40 * GB)


@settings(deadline=None)
@given(*[st.integers(0, 2**50)] * 3, st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 2**50))))
def test_the_parts_add_up(total: int, used: int, size: int, processes: list[tuple[int, int | None]]) -> None:
    device = made.device(total=total, used=used, free=0, processes=tuple(DeviceProcess(p, "", b) for p, b in processes))
    rank = made.on_gpu(sets=(made.weight_set(bytes=size, leases=(made.lease(1), made.lease(2))),))
    own = ownership(made.snapshot(rank, devices=(device,)), device)
    assert own.weights + own.engines + own.other + own.free == own.total == total
    assert min(own.weights, own.engines, own.other, own.free) >= 0
