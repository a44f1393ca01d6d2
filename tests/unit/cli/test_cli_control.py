"""`wcache load`, `verify`, `evict`, `drain`, `resume`: what they ask, print and return."""

from __future__ import annotations

import pytest

from weightcache import protocol
from weightcache.protocol import Done, Failure, Loaded, LoadProgress, Progress, RankReport, Verified

PROGRESS = [Progress(LoadProgress("importing", 0, 0, 1.0)), Progress(LoadProgress("loading", 10**9, 2 * 10**9, 3.0))]


def test_load(host):
    agent = host.agent(0, *PROGRESS, PROGRESS[-1], Loaded("s1"))
    got = host.wcache("load", "--wait", "30")
    assert (got.status, got.err) == (0, "")
    assert got.out.splitlines() == [
        "rank 0: importing, 1.0 s",
        "rank 0: loading 1.00 GB of 2.00 GB, 3.0 s",
        "rank 0: ready, set s1",
    ]
    assert agent.asked == [protocol.Load(30.0)]


def test_load_on_a_terminal_is_one_line(host, monkeypatch):
    host.agent(0, *PROGRESS, Loaded("s1"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    got = host.wcache("load")
    assert got.out.count("\n") == 1
    assert got.out.startswith("\rrank 0: importing, 1.0 s\x1b[K\r")
    assert got.out.endswith("\r\x1b[Krank 0: ready, set s1\n")


def test_load_waits_as_long_as_a_load_may_take(host):
    host.config.write_text('[loader]\ntimeout_seconds = 77\n[memory]\nbackend = "host"\n')
    agent = host.agent(0, Loaded("s1"))
    assert host.wcache("load").status == 0
    assert agent.asked == [protocol.Load(77.0)]


def test_load_again_asks_who_leads(host):
    host.config.write_text('[memory]\nbackend = "host"\n[deployment]\ntp_size = 2\n')
    agents = [host.agent(rank, Loaded(f"s{rank}")) for rank in range(2)]
    got = host.wcache("load", "--wait", "5", "--again")
    assert (got.status, got.out) == (0, "rank 0: ready, set s0\nrank 1: ready, set s1\n")
    assert [agent.asked for agent in agents] == [[protocol.Load(5.0, again=True)], [protocol.Load(5.0)]]
    assert host.wcache("load", "--wait", "5", "--again", "--rank", "1").status == 0
    assert [agent.asked[1:] for agent in agents] == [[protocol.Load(5.0, again=True)], [protocol.Load(5.0)]]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("loading", 75),
        ("load-failed", 1),
        ("drained", 1),
        ("empty", 1),
        ("config", 78),
        ("permission", 77),
        ("checkpoint", 66),
        ("no-device", 69),
        ("version-skew", 76),
        ("never heard of", 70),
    ],
)
@pytest.mark.parametrize("command", ["load", "verify", "evict", "drain", "resume"])
def test_an_agents_error_is_one_sentence_and_its_exit_status(host, command, code, status):
    host.agent(0, Failure(code, "no, because \x1b"))
    got = host.wcache(command)
    assert got.status == status
    assert got.err == "wcache: no, because \\x1b\n"


@pytest.mark.parametrize("command", ["load", "verify", "evict", "drain", "resume"])
def test_no_agent(host, command):
    got = host.wcache(command)
    assert got.status == 69
    assert got.err.startswith("wcache: no agent listens at ")
    assert got.err.count("\n") == 1
    host.config.unlink()
    assert host.wcache(command).status == 78


def test_agents_that_name_their_rank(host):
    host.agent(0, Done("rank 0 is drained until `wcache resume`"))
    assert host.wcache("drain").out == "rank 0 is drained until `wcache resume`\n"


def test_several_ranks(host):
    host.agent(0, Done("resumed"))
    host.agent(1, Failure("permission", "only root may resume"))
    got = host.wcache("resume")
    assert got.status == 77
    assert got.out == "rank 0: resumed\n"
    assert got.err == "wcache: rank 1: only root may resume\n"
    assert host.wcache("resume", "--rank", "0").status == 0


def test_verify(host):
    agent = host.agent(0, *PROGRESS, Verified(2, 269_000_000, 0.31))
    got = host.wcache("verify")
    assert (got.status, got.out) == (0, "rank 0: 2 sets intact, 0.27 GB read in 0.3 s\n")
    assert agent.asked == [protocol.Verify()]
    host.agent(1, Failure("damaged", "arena 0 of set s1 has changed"))
    assert host.wcache("verify", "--rank", "1").status == 1


def test_drain_and_resume_ask_what_they_say(host):
    agent = host.agent(0, Done("done"))
    assert host.wcache("drain", "--wait", "0.5").status == 0
    assert host.wcache("drain").status == 0
    assert host.wcache("resume").status == 0
    assert agent.asked == [protocol.Drain(0.5), protocol.Drain(60.0), protocol.Resume()]


def test_evict_all(host):
    agent = host.agent(0, Done("dropped 1 set"))
    got = host.wcache("evict")
    assert (got.status, got.out) == (0, "rank 0: dropped 1 set\n")
    assert host.wcache("evict", "--force").status == 0
    assert agent.asked == [protocol.Evict(None), protocol.Evict(None, True)]


def test_evict_one_set_wherever_it_is(host, make_status, make_set):
    def answer(rank, *ids):
        sets = tuple(make_set(id=name) for name in ids)
        report = RankReport(make_status(rank, sets=sets))
        return lambda message: [report if isinstance(message, protocol.Status) else Done(f"dropped {message.set_id}")]

    host.agent(0, answer=answer(0, "abc1", "abc2"))
    one = host.agent(1, answer=answer(1, "abd1", "ab"))
    got = host.wcache("evict", "abd", "--force")
    assert (got.status, got.out) == (0, "rank 1: dropped abd1\n")
    assert one.asked[-1] == protocol.Evict("abd1", True)
    assert host.wcache("evict", "ab").out == "rank 1: dropped ab\n"
    got = host.wcache("evict", "abc")
    assert (got.status, got.err) == (1, "wcache: 'abc' is the beginning of abc1, abc2: which one?\n")
    got = host.wcache("evict", "zz")
    assert (got.status, got.err) == (1, "wcache: no set 'zz' is resident (resident: abc1, abc2, abd1, ab)\n")
    assert host.wcache("evict", "").status == 1


def test_evict_in_use(host):
    host.agent(0, Failure("in-use", "1 engine is attached"))
    assert host.wcache("evict").status == 1
