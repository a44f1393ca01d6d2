"""The exporter's unit beside two ranks: what it sees, what it may, and that stopping a rank does not stop it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as read_classic

from tests.systemd.machine import Machine
from tests.systemd.rank import RUN, Client, Rank, configuration, eventually, reset

EXPORTER = "weightcache-exporter.service"
USER = "weightcache-exporter"
ASK = (
    "import sys, urllib.request as r; "
    "sys.stdout.write(r.urlopen('http://127.0.0.1:9464' + sys.argv[1], timeout=5).read().decode())"
)
INSPECT = """
import sys
sys.path.insert(0, "/usr/lib/weightcache")
from weightcache.client import Conversation
from weightcache.protocol import Inspect, Status
for name in sys.argv[1:]:
    try:
        with Conversation(name) as agent:
            agent.send(Status() if name.endswith("0.status.sock") else Inspect(None))
            print(type(agent.receive()[0]).__name__)
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.fixture
def ranks(agents: Machine, trusting: None) -> Iterator[list[Rank]]:
    """Ranks 0 and 1, stopped, and the exporter, started."""
    reset(agents, configuration(), (0, 1))
    agents.systemctl("start", EXPORTER)
    yield [Rank(agents, 0), Rank(agents, 1)]
    agents.systemctl("stop", EXPORTER)


def scrape(machine: Machine) -> dict[str, Metric]:
    text = machine.run("/usr/bin/python3", "-c", ASK, "/metrics").stdout
    return {family.name: family for family in read_classic(text)}


def values(machine: Machine, name: str, **labels: str) -> dict[str, float]:
    """The samples of a gauge with these labels, by rank."""
    found = scrape(machine).get(name)
    samples = [s for s in (found.samples if found else []) if labels.items() <= s.labels.items()]
    return {sample.labels["rank"]: sample.value for sample in samples}


def test_two_ranks_one_of_them_stopped(ranks: list[Rank]) -> None:
    machine = ranks[0].machine
    for rank in ranks:
        rank.ready()
    eventually(
        lambda: values(machine, "weightcache_rank_ready") == {"0": 1, "1": 1}, lambda: machine.messages(EXPORTER)
    )
    assert values(machine, "weightcache_rank_kept", kept="store") == {"0": 1, "1": 1}
    with Client(ranks[1]):
        eventually(lambda: values(machine, "weightcache_leases") == {"0": 0, "1": 1})

    machine.systemctl("stop", ranks[0].service, ranks[0].socket)
    eventually(lambda: values(machine, "weightcache_agent_up") == {"0": 0, "1": 1})
    assert values(machine, "weightcache_rank_state", state="stopped") == {"0": 1, "1": 0}
    machine.systemctl("stop", "weightcache.target")
    eventually(lambda: values(machine, "weightcache_agent_up") == {"0": 0, "1": 0})
    assert machine.show(EXPORTER, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}

    machine.systemctl("start", "weightcache.target", *(rank.service for rank in ranks))
    eventually(lambda: values(machine, "weightcache_rank_ready") == {"0": 1, "1": 1})
    assert "metrics at http://127.0.0.1:9464/metrics" in machine.show(EXPORTER, "StatusText")["StatusText"]


def test_its_user_sees_the_status_and_gets_no_weights(ranks: list[Rank]) -> None:
    machine = ranks[0].machine
    for rank in ranks:
        rank.ready()
    sockets = [
        f"{RUN}/{name}" for name in ("0.status.sock", "1.status.sock", "0.sock", "0.publish.sock", "loader.sock")
    ]
    told = machine.run("/usr/bin/python3", "-I", "-c", INSPECT, *sockets, user=USER).stdout.split()
    assert told == ["RankReport", *["PermissionRefused"] * 4]
    stranger = machine.run("/usr/bin/python3", "-I", "-c", INSPECT, sockets[0], user="stranger").stdout.split()
    assert stranger == ["PermissionRefused"]
