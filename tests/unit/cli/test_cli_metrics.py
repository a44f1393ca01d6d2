"""`wcache metrics`."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_classic

from weightcache.protocol import RankReport


def samples(families: object) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value
        for family in families  # type: ignore[attr-defined]
        for sample in family.samples
    }


def test_ranks_that_answer_and_ranks_that_do_not(host, make_status):
    host.agent(0, RankReport(make_status()))
    (host.run / "1.json").write_text("{}")
    got = host.wcache("metrics")
    assert (got.status, got.err) == (0, "")
    found = samples(read_openmetrics(got.out))
    assert found["weightcache_agent_up", "0"] == 1
    assert found["weightcache_agent_up", "1"] == 0
    only = samples(read_openmetrics(host.wcache("metrics", "--rank", "1").out))
    assert {rank for _, rank in only} == {"", "1"}


def test_a_host_without_ranks_is_no_error(host, monkeypatch):
    monkeypatch.setattr("weightcache.cli.metrics.find_ranks", lambda _: [])
    got = host.wcache("metrics")
    assert (got.status, got.err) == (0, "")
    assert list(samples(read_openmetrics(got.out))) == [("weightcache_build_info", "")]


def test_a_textfile_replaces_the_one_before(host, make_status, tmp_path: Path):
    host.agent(0, RankReport(make_status()))
    file = tmp_path / "weightcache.prom"
    file.write_text("old")
    got = host.wcache("metrics", "--textfile", str(file))
    assert (got.status, got.out, got.err) == (0, "", "")
    text = file.read_text()
    assert samples(read_classic(text))["weightcache_agent_up", "0"] == 1
    assert "# EOF" not in text
    assert [path.name for path in tmp_path.glob("weightcache.prom*")] == ["weightcache.prom"]


def test_a_textfile_that_nobody_would_read(host, tmp_path: Path):
    got = host.wcache("metrics", "--textfile", str(tmp_path / "weightcache.txt"))
    assert got.status == 2
    assert "files that end in .prom" in got.err
    got = host.wcache("metrics", "--textfile", str(tmp_path / "none" / "a.prom"))
    assert got.status == 78
    assert "No such file or directory" in got.err
