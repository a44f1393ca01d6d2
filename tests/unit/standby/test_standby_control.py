"""What the command line asks of a launcher, and what becomes of answers that are none."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightcache.errors import AgentUnavailable, ProtocolError, WeightcacheError
from weightcache.standby import control
from weightcache.standby.control import Command, Reply
from weightcache.standby.messages import Process
from weightcache.standby.status import SlotStatus

STATUS = SlotStatus("e", "a", "standby", 1.0, Process(1, 1))


@contextlib.contextmanager
def launcher(path: Path, answer: Callable[[bytes], bytes | None]) -> Iterator[list[Command]]:
    """A launcher's control socket: ``answer`` makes the reply, None closes the connection."""
    asked: list[Command] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                data = connection.recv(65536)
                asked.append(control.decode_command(data))
                if (reply := answer(data)) is not None:
                    connection.send(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("reply", [Reply(True, "done", STATUS), Reply(False, "it is parked")])
def test_a_command_gets_its_reply(tmp_path: Path, reply: Reply) -> None:
    path = tmp_path / "e-a.control"
    with launcher(path, lambda _: control.encode(reply)) as asked:
        assert control.ask(path, Command("park"), 10) == reply
    assert asked == [Command("park")]


@pytest.mark.parametrize("reply", [b"{", b"[]", b'{"ok": 1}', b"[" * 50_000])
def test_an_answer_that_is_none_is_an_error(tmp_path: Path, reply: bytes) -> None:
    path = tmp_path / "e-a.control"
    with launcher(path, lambda _: reply), pytest.raises(ProtocolError, match="something else"):
        control.ask(path, Command("report"), 10)


def test_a_launcher_that_goes_away_is_said(tmp_path: Path) -> None:
    path = tmp_path / "e-a.control"
    with launcher(path, lambda _: None), pytest.raises(AgentUnavailable, match="went away before it answered"):
        control.ask(path, Command("wake"), 10)


def test_a_launcher_that_says_nothing_costs_the_time_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "e-a.control"
    release = threading.Event()

    def silent(_data: bytes) -> None:
        release.wait(10)

    began = time.monotonic()
    with launcher(path, silent):
        with pytest.raises(AgentUnavailable, match="did not answer"):
            control.ask(path, Command("report"), 0.2)
        assert time.monotonic() - began < 5
        release.set()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match="no launcher answers"):
        control.ask(tmp_path / "e-a.control", Command("report"), 1)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"verb": "kill"}', b'{"verb": "park", "x": 1}', b"[" * 50_000, b"\xff"])
def test_a_command_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - of any kind
        control.decode_command(data)
    assert not isinstance(error.value, WeightcacheError)
