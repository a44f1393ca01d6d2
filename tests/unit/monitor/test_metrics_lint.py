"""The rules that promtool and the OpenMetrics standard have for names, units, types and labels, on any snapshot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_classic

from tests.unit.contracts.strategies import values
from tests.unit.monitor.observed import GPUS, UUID, down, pair, slot, snapshot, up, weight_set
from weightcache.monitor import labels, metrics
from weightcache.monitor.families import FAMILIES, RANK, SLOT, Family
from weightcache.monitor.view import RankView
from weightcache.protocol import RankStatus
from weightcache.standby.listing import EngineView
from weightcache.standby.status import Promotion

UNITS = ("seconds", "bytes")
FOREIGN = (
    "milliseconds",
    "minutes",
    "hours",
    "kilobytes",
    "megabytes",
    "gigabytes",
    "mib",
    "gib",
    "mb",
    "gb",
    "percent",
)
LABELS = {
    "rank", "gpu", "UUID", "role", "state", "code", "kept", "event", "source", "result", "backend", "version", "python",
    "pci_bus_id", "gpu_name", "model", "revision", "digest", "engine", "slot", "cause",
}  # fmt: skip
MOST_SERIES = 250
"""Of one rank with one set: what a Prometheus of many hosts bears easily."""

MOST_ENGINE_SERIES = 40


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_types_and_units(family: Family) -> None:
    assert re.fullmatch(r"weightcache(_[a-z]+)+", family.name)
    assert not family.name.endswith(("_total", "_info", "_created", "_bucket", "_count", "_sum"))
    words = family.name.split("_")
    assert not set(words) & set(FOREIGN)
    for unit in set(words) & set(UNITS):
        assert words[-1] == unit == family.unit
        assert words.count(unit) == 1
    assert ("timestamp" in words) <= (family.unit == "seconds" and family.type == "gauge")
    assert not set(words) & {"gauge", "counter", "histogram", "summary"}
    assert family.help.endswith(".")
    assert "\n" not in family.help
    assert set(family.labels) <= LABELS
    if family.name.startswith("weightcache_engine_"):
        assert family.labels[: len(SLOT)] in (SLOT, SLOT[:1])
    else:
        assert family.labels[:3] == RANK or family.name == "weightcache_build"


def test_no_two_families_share_a_series() -> None:
    series = [name for family in FAMILIES for name in family.series]
    assert len(series) == len(set(series))


def test_every_family_says_what_it_is() -> None:
    lines = metrics.text(snapshot(up(), standby=(pair(),)), GPUS)[0].decode().splitlines()
    for family in FAMILIES:
        assert f"# HELP {family.name} {family.help}" in lines
        assert f"# TYPE {family.name} {family.type}" in lines
        assert (f"# UNIT {family.name} {family.unit}" in lines) == bool(family.unit)


def test_a_rank_is_not_many_series() -> None:
    lines = [line for line in metrics.text(snapshot(up()), GPUS, "")[0].decode().splitlines() if line[0] != "#"]
    assert len(lines) < MOST_SERIES


def test_an_engine_with_a_standby_is_not_many_series() -> None:
    text = metrics.text(snapshot(standby=(pair(),)), GPUS, "")[0].decode()
    assert len([line for line in text.splitlines() if line.startswith("weightcache_engine_")]) < MOST_ENGINE_SERIES


def test_no_label_grows_with_what_happens() -> None:
    """Only values of closed lists, of the host's hardware, and of the newest set of a role."""
    many = [weight_set(role=f"{kind}-{n}", version=n, model=f"/m/{n}") for n in range(500) for kind in ("draft", "odd")]
    counts = {f"{event}:{n}": n for n in range(500) for event in ("refused", "verification-failed", "new-event")}
    views = [up(sets=tuple(many), counts=counts | {f"e{n}": n for n in range(500)}, state="x", backend="y", kept="z")]
    text = metrics.text(snapshot(*views), GPUS, "")[0].decode()
    assert len(text.splitlines()) < 500
    for label in LABELS:
        assert len(set(re.findall(rf'[{{,]{label}="([^"]*)"', text))) <= 20, label


statuses = st.one_of(
    values(RankStatus),
    st.builds(up, kept=st.text(), gpu_uuid=st.sampled_from([UUID, ""])).map(lambda view: view.status),
)
views = st.builds(
    RankView, statuses, st.sampled_from(["up", "down", "closed"]), st.none(), st.floats(0, 2e9, allow_nan=False)
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(views, max_size=3, unique_by=lambda view: view.status.rank),
    st.lists(
        st.builds(pair, engine=st.text(max_size=90)), max_size=3, unique_by=lambda pair: labels.clean(pair.engine)
    ),
)
def test_any_snapshot_is_readable(ranks: list[RankView], engines: list[EngineView]) -> None:
    seen = snapshot(*ranks, standby=tuple(engines))
    text = metrics.text(seen, GPUS)[0].decode()
    found = {family.name: family for family in read_openmetrics(text)}
    assert len(found.get("weightcache_agent_up", _NOTHING).samples) == len(ranks)
    series = [(s.name, tuple(sorted(s.labels.items()))) for family in found.values() for s in family.samples]
    assert len(series) == len(set(series))
    old = {s.name for family in read_classic(metrics.text(seen, GPUS, "")[0].decode()) for s in family.samples}
    assert old == {name for name, _ in series if not name.endswith("_created")}
    assert all(len(value) <= 100 for _, labels in series for _, value in labels)


class _Nothing:
    samples = ()


_NOTHING = _Nothing()


def test_huge_numbers_and_down_ranks_are_numbers() -> None:
    odd = pair(
        slot(
            "a", "active", restarts=10**400, promoted={"death": -1, "x": 1}, promotions=(Promotion(-1, 1e300, "wake"),)
        )
    )
    seen = snapshot(up(sets=(weight_set(bytes=10**400, load_seconds=-1.0),)), down(rank=1), standby=(odd,))
    for family in read_openmetrics(metrics.text(seen, GPUS)[0].decode()):
        assert all(0 <= sample.value <= 2**63 for sample in family.samples)
