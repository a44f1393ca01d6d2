"""The exporter in a process of its own, with real agents, good clients and bad ones."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from tests.unit.server.conftest import agent, kept, named, named_with_sdnotify  # noqa: F401 - fixtures
from tests.unit.server.harness import Agent, eventually
from tests.unit.server.kept import Kept
from weightcache.monitor import brief, web

HANDED = """
import os, sys
os.dup2(int(sys.argv.pop(1)), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Exporter:
    """One `wcache exporter`."""

    def __init__(
        self, directory: Path, *arguments: str, listen: str = "127.0.0.1:0", handed: int = -1, **popen: object
    ):
        command = ["-m", "weightcache.cli", "--runtime-dir", str(directory), "exporter", "--listen", listen, *arguments]
        before = [sys.executable, "-c", HANDED, str(handed)] if handed >= 0 else [sys.executable]
        self.process = subprocess.Popen(
            [*before, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[handed] if handed >= 0 else [],
            **popen,  # type: ignore[call-overload]
        )
        self.url = ""

    def ready(self) -> Exporter:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("metrics at http://"), self.process.communicate()
        self.url = line.split()[2]
        return self

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition("/")[0].rpartition(":")
        return host.strip("[]"), int(port)

    def get(self, path: str = "/metrics", seconds: float = 10.0) -> tuple[int, str]:
        """Status and body."""
        asked = urllib.request.Request(
            self.url.removesuffix("/metrics") + path, headers={"Accept": "application/openmetrics-text"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def value(self, series: str, **labels: str) -> float | None:
        """The one sample of a series with these labels."""
        found = [
            sample.value
            for family in read_openmetrics(self.get()[1])
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def exporter(runtime_dir: Path) -> Iterator[Callable[..., Exporter]]:
    """Start an exporter for the agents of the test."""
    with contextlib.ExitStack() as running:

        def start(*arguments: str, **options: object) -> Exporter:
            started = Exporter(runtime_dir / "run", *arguments, **options)  # type: ignore[arg-type]
            running.callback(started.close)
            return started

        yield start


def up(exporter: Exporter) -> bool:
    return exporter.value("weightcache_agent_up", rank="0") == 1


def test_an_agent_that_is_killed_and_comes_back(kept: Kept, exporter: Callable[..., Exporter]) -> None:  # noqa: F811
    kept.start("--load")
    kept.await_state("ready")
    serving = exporter().ready()
    eventually(lambda: serving.value("weightcache_rank_ready", rank="0") == 1)
    with kept.attach():
        eventually(lambda: serving.value("weightcache_leases", role="target") == 1)
        assert serving.get("/health") == (200, "rank 0: ready\n")
        first = serving.value("weightcache_agent_start_time_seconds")
        kept.kill()
        eventually(lambda: (serving.value("weightcache_agent_start_time_seconds") or 0) > (first or 0))
    assert serving.value("weightcache_events_total", event="set-adopted") == 1
    assert serving.value("weightcache_set_bytes", role="target") == 131072


def test_the_state_for_other_nodes(agent: Agent, exporter: Callable[..., Exporter]) -> None:  # noqa: F811
    agent.start("--load")
    serving = exporter().ready()
    eventually(lambda: brief.decode(serving.get("/status")[1].encode())[0].state == "ready")
    status, text = serving.get("/status")
    assert status == 200
    (rank,) = brief.decode(text.encode())
    assert (rank.rank, rank.backend, len(rank.sets), rank.error) == (0, "host", 1, None)
    agent.stop(signal.SIGKILL)
    eventually(lambda: brief.decode(serving.get("/status")[1].encode())[0].state == "down")
    assert brief.decode(serving.get("/status")[1].encode())[0].sets == ()


def test_another_node_shows_it(agent: Agent, exporter: Callable[..., Exporter], tmp_path: Path) -> None:  # noqa: F811
    agent.start("--load")
    serving = exporter(listen="127.0.0.2:0").ready()
    eventually(lambda: serving.value("weightcache_rank_ready", rank="0") == 1)
    (tmp_path / "w.toml").write_text(
        f'[memory]\nbackend = "host"\n[exporter]\nlisten = "0.0.0.0:{serving.address[1]}"\n'
        '[deployment]\ntp_size = 2\nnodes = ["127.0.0.2", "127.0.0.1"]\n'
    )
    command = ["--config", str(tmp_path / "w.toml"), "--runtime-dir", str(tmp_path), "status"]
    done = subprocess.run(
        [sys.executable, "-m", "weightcache.cli", *command],
        env={**os.environ, "WEIGHTCACHE_NODE_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (69, f"wcache: no agent answers in {tmp_path}\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["node", "0", "(127.0.0.2):"] in lines
    assert lines[2][:3] == ["1", "unknown", "(down)"]
    assert ["0", "ready", "host"] in [line[:3] for line in lines]


def test_an_agent_that_stops_is_down(agent: Agent, exporter: Callable[..., Exporter]) -> None:  # noqa: F811
    agent.start()
    serving = exporter().ready()
    eventually(lambda: up(serving))
    agent.stop(signal.SIGKILL)
    eventually(lambda: not up(serving))
    assert serving.value("weightcache_rank_state", state="down") == 1
    status, text = serving.get("/health")
    assert status == 503
    assert text.startswith("rank 0: down: ")
    agent.start()
    eventually(lambda: up(serving))
    assert serving.get("/health")[0] == 200


def test_a_scrape_does_not_wait_for_an_agent_that_hangs(agent: Agent, exporter: Callable[..., Exporter]) -> None:  # noqa: F811
    agent.start()
    serving = exporter().ready()
    eventually(lambda: up(serving))
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert serving.get()[0] == 200
        late = exporter().ready()  # it hears nothing of the rank, and serves
        assert late.get()[0] == 200
        assert time.monotonic() - began < 6
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    eventually(lambda: up(late))


def test_many_scrapes_at_once(agent: Agent, exporter: Callable[..., Exporter]) -> None:  # noqa: F811
    agent.start()
    serving = exporter().ready()
    eventually(lambda: up(serving))
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: serving.get(), range(200)))
    assert {status for status, _ in answers} == {200}
    assert all(text.endswith("# EOF\n") for _, text in answers)


def test_slow_and_silent_clients_keep_nobody_waiting(exporter: Callable[..., Exporter]) -> None:
    serving = exporter().ready()
    silent = [socket.create_connection(serving.address) for _ in range(web.MOST + 50)]
    dripping = socket.create_connection(serving.address)
    began = time.monotonic()
    for byte in b"GET /metrics HTTP/1.1\r\n":
        dripping.send(bytes([byte]))
        time.sleep(0.01)
        assert serving.get(seconds=2)[0] == 200
    assert time.monotonic() - began < 5
    # Those that were there first had to leave when it became too many.
    silent[0].settimeout(2)
    assert silent[0].recv(1) == b""
    for sock in (*silent, dripping):
        sock.close()
    assert serving.get()[0] == 200


def test_a_client_that_reads_nothing_and_one_that_sends_too_much(exporter: Callable[..., Exporter]) -> None:
    serving = exporter().ready()
    with socket.create_connection(serving.address) as deaf:
        deaf.send(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert serving.get()[0] == 200
    with socket.create_connection(serving.address) as chatty, contextlib.suppress(ConnectionError):
        chatty.settimeout(5)
        chatty.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 200_000)
        assert chatty.recv(100).startswith(b"HTTP/1.1 400 ")
    assert serving.get("/../etc/passwd")[0] == 404


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once(agent: Agent, exporter: Callable[..., Exporter], sign: int) -> None:  # noqa: F811
    agent.start()
    serving = exporter().ready()
    eventually(lambda: up(serving))
    with socket.create_connection(serving.address):
        began = time.monotonic()
        serving.process.send_signal(sign)
        out, err = serving.process.communicate(timeout=5)
    assert time.monotonic() - began < 2
    assert (serving.process.returncode, out, err) == (0, "", "")


def test_ipv6_and_a_socket_that_is_handed_in(exporter: Callable[..., Exporter]) -> None:
    six = exporter(listen="[::1]:0").ready()
    assert six.url.startswith("http://[::1]:")
    assert six.get()[0] == 200
    with socket.create_server(("127.0.0.1", 0)) as handed:
        port = handed.getsockname()[1]
        serving = exporter(listen="nowhere.invalid:1", handed=handed.fileno()).ready()
        assert serving.url == f"http://127.0.0.1:{port}/metrics"
        assert serving.get("/health") == (503, "no rank is known\n")


def test_the_manager_is_told(tmp_path: Path, exporter: Callable[..., Exporter]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        serving = exporter(env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}).ready()
        assert manager.recv(1000).decode() == f"READY=1\nSTATUS=metrics at {serving.url}"


@pytest.mark.parametrize(
    ("listen", "says"),
    [("127.0.0.1:{}", "Address already in use"), ("nowhere.invalid:1", "not known"), ("::1", "expected")],
)
def test_an_address_that_cannot_be_had_is_one_sentence(
    exporter: Callable[..., Exporter], listen: str, says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = exporter(listen=listen.format(taken.getsockname()[1]))
        out, err = started.process.communicate(timeout=20)
    assert started.process.returncode in (2, 78)
    assert out == ""
    assert err.startswith("wcache: ")
    assert says in err
    assert err.count("\n") == 1


def test_the_configured_address_is_used(tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "w.toml").write_text(
        '[memory]\nbackend = "host"\n[exporter]\nlisten = "127.0.0.1:1x"\n[[rank]]\nrank = 0'
    )
    command = [sys.executable, "-m", "weightcache.cli", "--config", str(tmp_path / "w.toml"), "exporter"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert "exporter.listen: expected HOST:PORT" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = (tmp_path / "w.toml").read_text().replace("1x", str(port))
        (tmp_path / "w.toml").write_text(text)
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in done.stderr
