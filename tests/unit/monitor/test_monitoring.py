"""The alert rules and the dashboard use metrics, labels and values that there are, and are what they claim to be."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.support.environments import REPOSITORY
from weightcache.monitor.families import CAUSES, ENGINE_ROLES, EVENTS, FAMILIES, KEPT, LOADS, OTHER, REFUSALS, STATES

FOLDER = REPOSITORY / "packaging" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "weightcache-rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "weightcache-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
OPERATIONS = (REPOSITORY / "docs" / "operations.md").read_text()

EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]},
}
LABELS = {series: {*family.labels, "le"} for family in FAMILIES for series in family.series}
VALUES = {
    "state": STATES,
    "kept": KEPT,
    "event": EVENTS,
    "source": [source for source, _ in LOADS],
    "result": [result for _, result in LOADS],
    "code": [*REFUSALS, "damaged", OTHER],
    "role": ["target", *ENGINE_ROLES],
    "cause": CAUSES,
}
FOREIGN = {"up": {"job"}, "DCGM_FI_DEV_FB_USED": {"UUID", "gpu"}}
"""Metrics of others, and the labels that are used of them."""

OF_A_SCRAPE = {"instance", "job"}
FUNCTIONS = {
    "absent", "and", "by", "changes", "count", "group_left", "histogram_quantile", "increase", "max", "on", "or",
    "quantile_over_time", "rate", "round", "sort_desc", "sum", "time", "unless",
}  # fmt: skip


def selectors(expression: str) -> list[tuple[str, str]]:
    """Names of metrics, with the labels in braces behind them."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\b(by|on|without|ignoring|group_left)\s*\([^)]*\)|\[[^]]*\]", " ", bare)
    found = re.findall(r"([A-Za-z_:][\w:]*)\s*(?:\{([^}]*)\})?", bare)
    return [(name, inside) for name, inside in found if name not in FUNCTIONS]


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_metrics_and_labels_exist(title: str) -> None:
    expression = EXPRESSIONS[title]
    used: set[str] = set()
    for name, inside in selectors(expression):
        known = LABELS.get(name, FOREIGN.get(name))
        assert known is not None, f"no metric is called {name}"
        used |= known
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside):
            assert label in known | OF_A_SCRAPE, f"{name} has no label {label}"
    for group in re.findall(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)", expression):
        assert set(re.findall(r"\w+", group)) <= used | OF_A_SCRAPE


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_values_of_labels_exist(title: str) -> None:
    for label, texts in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', EXPRESSIONS[title]):
        if label in VALUES:
            assert set(texts.split("|")) <= set(VALUES[label]), f"{label} is never {texts}"


def test_the_selectors_are_found_at_all() -> None:
    """Of this test's own reading of PromQL."""
    text = 'sum by (a) (rate(m_x{rank=~"$rank", code="b"}[5m])) / on (a) group_left (c) n > 2'
    assert selectors(text) == [("m_x", "rank=~, code="), ("n", "")]
    named = {name for expression in EXPRESSIONS.values() for name, _ in selectors(expression)}
    assert len(named & set(LABELS)) >= 18


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_happened_what_it_means_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Weightcache[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert not rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    section = re.match(r'docs/operations\.md, "([^"]+)"', rule["annotations"]["runbook"])
    assert section, rule["annotations"]["runbook"]
    assert f"\n## {section[1]}\n" in OPERATIONS


def test_templates_use_labels_that_the_expression_leaves() -> None:
    for rule in RULES:
        names = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        if aggregated := re.match(r"sum by \(([^)]*)\)", rule["expr"]):
            assert names <= set(aggregated[1].split(", ")), rule["alert"]
        else:
            metrics = [LABELS.get(name, FOREIGN.get(name, set())) for name, _ in selectors(rule["expr"])]
            assert names <= set.union(*metrics) | OF_A_SCRAPE, rule["alert"]


def test_what_has_to_be_alerted_is() -> None:
    alerts = {rule["alert"].removeprefix("Weightcache") for rule in RULES}
    assert {"RankNotReady", "AgentDown", "VerificationFailed", "StoreLost", "FallbackToDisk"} <= alerts
    assert {"Unused", "LoadSlow", "Degraded", "ExporterDown"} <= alerts
    assert {"NoActiveEngine", "NoStandby", "EngineDied", "EngineHidden"} <= alerts


def test_the_dashboard_is_nobodys() -> None:
    assert "uid" not in DASHBOARD
    assert "id" not in DASHBOARD
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance", "rank"}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}"}
    assert "http" not in text
    assert DASHBOARD["schemaVersion"] >= 38  # Grafana 10


def test_panels_have_a_place_a_datasource_and_a_purpose() -> None:
    taken: set[tuple[int, int]] = set()
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    for panel in PANELS:
        assert panel["type"] in ("stat", "state-timeline", "timeseries", "table")
        assert panel["title"]
        assert panel["description"].endswith(".")
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_state_has_a_word_and_a_colour_on_the_timeline() -> None:
    [timeline] = [panel for panel in PANELS if panel["type"] == "state-timeline"]
    [mapping] = timeline["fieldConfig"]["defaults"]["mappings"]
    numbers = re.findall(r'state="([a-z]+)"} \* (\d+)', timeline["targets"][0]["expr"])
    assert {mapping["options"][number]["text"]: number for _, number in numbers} == dict(numbers)
    assert {state for state, _ in numbers} == set(STATES)
