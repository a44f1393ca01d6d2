"""The port that the launcher holds: handed in as systemd does, or bound."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightcache
from weightcache.errors import UsageError
from weightcache.launch import listener
from weightcache.sglang_options import given, why_no_socket

CODE = """
import os, sys
from weightcache.errors import UsageError
from weightcache.launch import listener
os.environ["LISTEN_PID"] = str(os.getpid())
try:
    found = listener.handed_in(os.environ, int(sys.argv[1]))
except UsageError as error:
    print(error.message)
else:
    held = found is not None and (found.getsockname()[1], os.get_inheritable(found.fileno()))
    print(held, [name for name in os.environ if name.startswith("LISTEN")])
"""


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def number(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def handed(fds: list[int], expected: int) -> str:
    """What a process says that was started with these descriptors as 3, 4, ... ."""
    place = "; ".join(f"exec {3 + i}<&{fd}" for i, fd in enumerate(fds))
    script = f'{place + "; " if place else ""}exec "$@"'
    env = {**os.environ, "PYTHONPATH": str(Path(weightcache.__file__).parent.parent), "LISTEN_FDS": str(len(fds))}
    command = ["bash", "-c", script, "bash", sys.executable, "-c", CODE, str(expected)]
    done = subprocess.run(command, env=env, pass_fds=fds, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_listening_socket_is_taken(port: socket.socket) -> None:
    assert handed([port.fileno()], number(port)) == f"({number(port)}, False) []"


def test_another_port_is_an_error_that_names_the_right_one(port: socket.socket) -> None:
    assert handed([port.fileno()], 1) == f"the socket that was handed in listens on port {number(port)}: " + (
        f"give the engine --port {number(port)} as well"
    )


def test_none_is_none() -> None:
    assert handed([], 1) == "False []"


def test_several_are_refused(port: socket.socket) -> None:
    assert handed([port.fileno(), port.fileno()], number(port)) == "2 sockets were handed in: an engine listens on one"


def test_a_connection_is_refused(port: socket.socket) -> None:
    with socket.create_connection(port.getsockname()) as client:
        assert "does not listen" in handed([client.fileno()], number(port))


def test_other_sockets_and_files_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        assert "is no TCP socket" in handed([unix.fileno()], 1)
    with (tmp_path / "file").open("w") as file:
        assert handed([file.fileno()], 1) == "what was handed in is no socket"


def test_variables_of_another_process_are_only_removed() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http", "OTHER": "kept"}
    assert listener.handed_in(environment, 1) is None
    assert environment == {"OTHER": "kept"}


def test_bound_queues_connections_that_nobody_accepts(port: socket.socket) -> None:
    free = number(port)
    port.close()
    with listener.bound("", free) as held:
        assert not os.get_inheritable(held.fileno())
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
        clients = [socket.create_connection(("127.0.0.1", free), 5) for _ in range(50)]
        for client in clients:
            client.close()


def test_bound_on_all_addresses_and_ipv6(port: socket.socket) -> None:
    free = number(port)
    port.close()
    with listener.bound("0.0.0.0", free), socket.create_connection(("127.0.0.1", free), 5):
        pass
    with listener.bound("::1", free) as held:
        assert held.family == socket.AF_INET6


def test_a_port_that_is_taken(port: socket.socket) -> None:
    with pytest.raises(
        UsageError, match=f"port {number(port)} of 127.0.0.1 cannot be held \\(Address already in use\\)"
    ):
        listener.bound("", number(port))


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 1)), (socket.AF_INET6, 1, 6, "", ("::1", 1, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(UsageError, match="localhost stands for several addresses"):
        listener.bound("localhost", 1)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="cannot be held"):
        listener.bound("no-such-host.invalid", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--port 1", ""),
        ("--tokenizer-worker-num 1", ""),
        ("--enable-http2", "http2"),
        ("--tokenizer-worker-num 2", "several processes"),
        ("--smg-grpc-mode", "gRPC"),
        ("--encoder-only", "not in"),
        ("--use-ray", "not in"),
        ("--nnodes 2 --node-rank 1", "first node"),
        ("--nnodes 2 --node-rank 0", ""),
    ],
)
def test_servers_that_bind_otherwise(arguments: str, said: str) -> None:
    found = why_no_socket(given(arguments.split()), {})
    assert said in found
    assert bool(found) == bool(said)


def test_held_only_when_asked_for(port: socket.socket) -> None:
    free = number(port)
    port.close()
    launch = given(["--port", str(free)])
    assert listener.held(launch, hold=False, environment={}) is None
    with listener.held(launch, hold=True, environment={}) or port as held:
        assert number(held) == free


def test_a_launch_whose_port_cannot_be_held_is_told(port: socket.socket) -> None:
    with pytest.raises(UsageError, match="the port cannot be held for this engine: --enable-http2"):
        listener.held(given(["--port", "1", "--enable-http2"]), hold=True, environment={})


def test_the_rust_server() -> None:
    assert "SGLANG_RUST_SERVER" in why_no_socket(given(["--port", "1"]), {"SGLANG_RUST_SERVER": "1"})
