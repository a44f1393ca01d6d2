"""`wcache ranks`: which ranks are this host's."""

from __future__ import annotations

import json
import socket

import pytest

from weightcache import nodes
from weightcache.monitor import site as sites

GPUS = tuple(f"GPU-0000000{i}-89ab-cdef-0123-456789abcdef" for i in range(4))


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.delenv(nodes.VARIABLE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b.cluster")
    monkeypatch.setattr(sites.gpus, "installed", lambda: GPUS)


def configure(host, text: str) -> None:
    host.config.write_text(text)


def test_the_table(host):
    configure(host, '[deployment]\ntp_size = 4\nnodes = ["gpu-a", "gpu-b"]\n')
    got = host.wcache("ranks")
    assert (got.status, got.err) == (0, "")
    header, *rows = [line.split() for line in got.out.splitlines()]
    assert header == ["NODE", "RANK", "REPLICA", "PP", "TP", "GPU", "SOCKET", "UNIT"]
    assert rows == [
        ["1", "2", "0", "0", "2", GPUS[0], str(host.run / "2.sock"), "weightcache@2.service"],
        ["1", "3", "0", "0", "3", GPUS[1], str(host.run / "3.sock"), "weightcache@3.service"],
    ]


def test_json_and_units(host):
    configure(host, "[deployment]\npp_size = 2\ndp_size = 2\n")
    data = json.loads(host.wcache("ranks", "--json").out)
    assert (data["schema"], data["node"], data["nodes"]) == (1, 0, [])
    assert data["ranks"][3] == {
        "node": 0,
        "rank": 3,
        "replica": 1,
        "pp_rank": 1,
        "tp_rank": 0,
        "gpu_uuid": GPUS[3],
        "socket": str(host.run / "3.sock"),
        "unit": "weightcache@3.service",
    }
    assert host.wcache("ranks", "--units").out == " ".join(f"weightcache@{i}.socket" for i in range(4)) + "\n"


def test_which_node_may_be_said(host, monkeypatch):
    configure(host, '[deployment]\ntp_size = 4\nnodes = ["gpu-a", "gpu-b"]\n')
    assert host.wcache("ranks", "--units", "--node", "0").out == "weightcache@0.socket weightcache@1.socket\n"
    monkeypatch.setenv(nodes.VARIABLE, "0")
    assert host.wcache("ranks", "--units").out == "weightcache@0.socket weightcache@1.socket\n"


def test_tables_name_gpus(host):
    text = '[deployment]\ntp_size = 2\n[[rank]]\nrank = 1\ngpu = "MIG-{}"\n[[rank]]\nrank = 0\ngpu = "{}"\n'
    configure(host, text.format(GPUS[3][4:], GPUS[2]))
    data = json.loads(host.wcache("ranks", "--json").out)
    assert [(rank["rank"], rank["gpu_uuid"]) for rank in data["ranks"]] == [(0, GPUS[2]), (1, f"MIG-{GPUS[3][4:]}")]


def test_host_memory_has_no_gpu(host):
    configure(host, '[memory]\nbackend = "host"\n[deployment]\ntp_size = 2\n')
    assert [line.split()[5] for line in host.wcache("ranks").out.splitlines()] == ["GPU", "-", "-"]
    configure(host, "")
    assert host.wcache("ranks", "--units").out == "weightcache@0.socket\n"


@pytest.mark.parametrize(
    ("table", "status", "says"),
    [
        ("tp_size = 8", 69, "rank 4 would be on GPU 4, and this host shows 4 GPUs"),
        ("tp_size = 3\nep_size = 2", 78, "deployment.ep_size: 2 expert groups do not divide tp_size = 3"),
        ('tp_size = 2\nnodes = ["198.51.100.1", "203.0.113.1"]', 78, "is none of 198.51.100.1, 203.0.113.1"),
        ('tp_size = 2\nnodes = ["gpu-b", "gpu-b.cluster"]', 78, "is gpu-b and gpu-b.cluster at the same time"),
    ],
)
def test_what_cannot_be_is_one_sentence(host, table, status, says):
    configure(host, f"[deployment]\n{table}\n")
    got = host.wcache("ranks")
    assert (got.status, got.out) == (status, "")
    assert says in got.err
    assert got.err.startswith("wcache: ")
    assert got.err.count("\n") == 1


@pytest.mark.parametrize("node", ["2", "x", "-1", ""])
def test_a_node_that_is_none(host, node):
    configure(host, '[deployment]\ntp_size = 4\nnodes = ["gpu-a", "gpu-b"]\n')
    got = host.wcache("ranks", f"--node={node}")
    assert got.status in (2, 78)
    assert got.err.count("\n") == 1


def test_other_commands_know_the_ranks(host):
    configure(host, '[memory]\nbackend = "host"\n[deployment]\ntp_size = 4\nnodes = ["gpu-a", "gpu-b"]\n')
    got = host.wcache("load", "--wait", "1")
    assert "rank 2: " in got.err
    assert "rank 3: " in got.err
    assert "rank 0: " not in got.err
    assert "valid (host memory, 4 ranks on 2 nodes, no model to hold)" in host.wcache("config", "check").out
    assert host.wcache("config", "get", "deployment.tp_size").out == "4\n"


def test_a_host_that_is_none_of_the_nodes_goes_by_its_sockets(host, make_status):
    from weightcache.protocol import RankReport

    configure(host, '[memory]\nbackend = "host"\n[deployment]\ntp_size = 4\nnodes = ["198.51.100.1", "203.0.113.1"]\n')
    got = host.wcache("load", "--wait", "1")
    assert got.status == 78
    assert "is none of" in got.err
    host.agent(3, RankReport(make_status(3)))
    got = host.wcache("status", "--json")
    assert got.status == 0
    assert "note: deployment.nodes: this host (gpu-b.cluster) is none of" in got.err
    assert [rank["rank"] for rank in json.loads(got.out)["ranks"]] == [3]


def test_doctor_looks_at_the_deployment(host, monkeypatch):
    text = '[memory]\nbackend = "cuda"\n[deployment]\ntp_size = {}\nnodes = ["localhost", "{}", "gpu-b"]\n'
    configure(host, text.format(3, "203.0.113.7"))
    out = host.wcache("doctor").out
    assert "ok       deployment: 3 ranks on 3 nodes; this is node 2, with rank 2\n" in out
    assert f"ok       rank 2: on {GPUS[0]}, GPU 0 of 4\n" in out
    assert "note     node 0: localhost is " in out
    assert "ok       node 1: 203.0.113.7 is 203.0.113.7\n" in out
    configure(host, text.format(18, "none.invalid"))
    out = host.wcache("doctor").out
    assert "problem  GPUs: rank 16 would be on GPU 4, and this host shows 4 GPUs\n" in out
    assert "problem  node 1: the name none.invalid is not known here\n" in out
    configure(host, '[deployment]\ntp_size = 2\nnodes = ["198.51.100.1", "203.0.113.1"]\n')
    assert "problem  deployment: deployment.nodes: this host" in host.wcache("doctor").out
