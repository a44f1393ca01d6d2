"""`wcache status`: its table, its JSON and its exit statuses."""

from __future__ import annotations

import json
import os
import re
import socket
import time

import pytest

from weightcache import protocol, records
from weightcache.protocol import DrainInfo, Failure, RankReport, RankStatus


def test_ready(host, make_status, make_set, make_lease):
    status = make_status(sets=(make_set(leases=(make_lease(), make_lease(pid=99, unit=""))),))
    host.agent(0, RankReport(status))
    got = host.wcache("status")
    assert (got.status, got.err) == (0, "")
    header, row, *rest = got.out.splitlines()
    assert header.split() == ["RANK", "STATE", "BACKEND", "GPU", "MODEL", "SETS", "SIZE", "KEPT", "ENGINES", "AGE"]
    shown = ["0", "ready", "host", "-", "/models/small", "1", "0.27 GB", "process", "2", "60 min"]
    assert re.split(r"  +", row.strip()) == shown
    assert row.index("ready") == header.index("STATE")
    assert rest[0].startswith(
        "rank 0: set s1abcd (target, version 1) of /models/small: 213 tensors, 0.27 GB in 1 arena"
    )
    assert rest[1].startswith("rank 0:   engine 4711 (root, sglang.service) for 61 s: python -m sglang.launch_server")
    assert rest[2].startswith("rank 0:   engine 99 (root) for")


def test_engines_that_a_report_does_not_name(host, make_status, make_set, make_lease):
    host.agent(0, RankReport(make_status(sets=(make_set(leases=(make_lease(),), leases_total=64),))))
    _, row, *rest = host.wcache("status").out.splitlines()
    assert re.split(r"  +", row.strip())[8] == "64"
    assert rest[2] == "rank 0:   and 63 engines more"


def test_json_is_the_record_and_whether_the_agent_is_up(host, make_status):
    status = make_status()
    host.agent(0, RankReport(status))
    got = host.wcache("status", "--json")
    assert got.status == 0
    data = json.loads(got.out)
    assert list(data) == ["schema", "ranks"]
    assert data["schema"] == 1
    plain = data["ranks"][0]
    assert plain.pop("agent") == "up"
    assert plain == json.loads(json.dumps(records.to_plain(status)))
    assert records.from_plain(RankStatus, plain) == status


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ready", "ready"], 0),
        (["ready", "loading"], 75),
        (["loading", "loading"], 75),
        (["loading", "failed"], 1),
        (["ready", "failed"], 1),
        (["ready", "drained"], 1),
        (["ready", "empty"], 1),
        (["degraded"], 1),
    ],
)
def test_exit_status(host, make_status, states, code):
    for rank, state in enumerate(states):
        host.agent(rank, RankReport(make_status(rank, state)))
    got = host.wcache("status")
    assert got.status == code
    assert got.err == ""
    if "failed" in states:
        assert "failed: the loader was killed by signal 9 [load-failed]" in got.out
    if "loading" in states:
        assert "loading: loading 5.00 GB of 16.4 GB, 12 s" in got.out


def test_one_rank_only(host, make_status):
    host.agent(0, RankReport(make_status(0, "failed")))
    host.agent(1, RankReport(make_status(1)))
    got = host.wcache("status", "--rank", "1", "--json")
    assert got.status == 0
    assert [rank["rank"] for rank in json.loads(got.out)["ranks"]] == [1]


def test_no_agent_at_all(host):
    got = host.wcache("status")
    assert got.status == 69
    assert got.err == f"wcache: no agent answers in {host.run}\n"
    assert "unknown (down)" in got.out
    data = json.loads(host.wcache("status", "--json").out)
    assert data["ranks"][0]["state"] == "unknown"
    assert data["ranks"][0]["agent"] == "down"
    assert data["ranks"][0]["error"]["code"] == "no-agent"
    plain = {key: value for key, value in data["ranks"][0].items() if key != "agent"}
    records.from_plain(RankStatus, plain)


def test_nothing_at_all(host):
    host.config.write_text("")
    host.run.rmdir()
    got = host.wcache("status", "--json")
    assert got.status == 69
    assert [rank["rank"] for rank in json.loads(got.out)["ranks"]] == [0]


def test_last_known_when_the_agent_is_down(host, make_status):
    host.agent(0, RankReport(make_status(0)))
    (host.run / "1.json").write_text(json.dumps(records.to_plain(make_status(1, "stopped"))))
    os.utime(host.run / "1.json", (time.time() - 300, time.time() - 300))
    got = host.wcache("status")
    assert got.status == 1
    assert "stopped (down)" in got.out
    assert "rank 1: agent down, last known 5 min ago: no agent listens at" in got.out
    assert json.loads(host.wcache("status", "--json").out)["ranks"][1]["state"] == "stopped"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 1}', "[" * 100000, "\xff"])
def test_a_spoiled_status_file_is_none(host, content):
    (host.run / "0.json").write_bytes(content.encode("latin-1"))
    got = host.wcache("status")
    assert got.status == 69
    assert "unknown (down)" in got.out


def test_sockets_are_found_beyond_the_configuration(host, make_status):
    host.agent(7, RankReport(make_status(7)))
    (host.run / "x.sock").touch()
    (host.run / "0.drained").touch()
    got = host.wcache("status", "--json")
    assert [rank["rank"] for rank in json.loads(got.out)["ranks"]] == [0, 7]


def test_an_agent_of_another_protocol(host):
    host.agent(0, answer=lambda _: [])
    host.agents[0]._answer = lambda _: [Failure("version-skew", "the peer speaks protocol 2")]
    got = host.wcache("status")
    assert got.status == 76
    assert got.err == "wcache: the peer speaks protocol 2\n"
    assert "unknown (not to be asked)" in got.out


def test_an_agent_that_stays_silent_delays_nobody_else(host, make_status, monkeypatch):
    monkeypatch.setattr("weightcache.monitor.view.ANSWER_SECONDS", 0.3)
    host.agent(0, RankReport(make_status(0)))
    host.agent(1)
    host.agent(2)
    started = time.monotonic()
    got = host.wcache("status")
    assert time.monotonic() - started < 2
    assert got.status == 1
    assert "did not answer within" in got.out


def test_garbage_from_an_agent_is_a_protocol_error(host):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sock:
        sock.bind(str(host.run / "0.status.sock"))
        sock.listen()
        host.agent(1, answer=lambda _: [protocol.Done("what?")])
        import threading

        def serve() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.send(b"garbage")
                connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        got = host.wcache("status")
        thread.join()
    assert got.status == 76
    assert "a packet that is no JSON" in got.out
    assert "answered Done" in got.out


def test_text_of_strangers_cannot_drive_the_terminal(host, make_status, make_set, make_lease):
    evil = "\x1b]0;owned\x07\n\u202e"
    entry = make_set(model=evil, leases=(make_lease(command=evil, unit=evil),))
    host.agent(0, RankReport(make_status(model=evil, sets=(entry,))))
    got = host.wcache("status")
    assert got.status == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(got.out)
    assert r"\x1b]0;owned\x07\n\u202e" in got.out


def test_drained_and_orphans(host, make_status, make_lease):
    host.agent(0, RankReport(make_status(0, "drained", drained=DrainInfo(0, 1e9), orphans=(make_lease(),))))
    got = host.wcache("status")
    assert got.status == 1
    assert "drained by root at 2001-09-" in got.out
    assert "engine of a set that is gone: engine 4711" in got.out


def test_colour_only_on_a_terminal_that_wants_it(host, make_status, monkeypatch):
    host.agent(0, RankReport(make_status()))
    assert "\x1b" not in host.wcache("status").out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mready\x1b[0m" in host.wcache("status").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in host.wcache("status").out


def test_a_broken_configuration_is_only_mentioned(host, make_status, monkeypatch, capfd):
    from weightcache import paths
    from weightcache.cli.main import main

    host.config.write_text("[memry]")
    monkeypatch.setattr(paths, "CONFIG_FILE", host.config)
    host.agent(0, RankReport(make_status()))
    assert main(["status", "--runtime-dir", str(host.run)]) == 0
    assert "wcache: note: " in capfd.readouterr().err
    assert host.wcache("status").status == 78
