"""The launcher's report socket: reports come in, and the HTTP port goes out to who asks for it."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from weightcache import transport
from weightcache.engine.directive import Decision, Directive, ListenerWanted, Report, encode_report, send_report
from weightcache.launch.reports import Receiver

SECONDS = 10.0


def asked(receiver: Receiver) -> tuple[list[Report], transport.Packet]:
    """Ask for the port; what the launcher heard, and what it answered."""
    with contextlib.closing(transport.connect(receiver.path, time.monotonic() + SECONDS)) as sock:
        sock.settimeout(SECONDS)
        transport.send_packet(sock, encode_report(ListenerWanted(os.getpid())))
        heard = receiver.take()
        return heard, transport.receive_packet(sock, max_fds=1)


def test_the_port_goes_to_who_asks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, Receiver(port) as receiver:
        heard, answer = asked(receiver)
        assert heard == [ListenerWanted(os.getpid())]
        with socket.socket(fileno=answer.fds[0]) as given:
            assert given.getsockname() == port.getsockname()
        assert len(asked(receiver)[1].fds) == 1  # an engine's successor
        with socket.create_connection(port.getsockname(), SECONDS):  # still here
            pass


def test_without_a_port_there_is_no_answer() -> None:
    with Receiver() as receiver:
        _, answer = asked(receiver)
        assert answer.data == b""


def test_other_reports_get_no_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, Receiver(port) as receiver:
        decision = Decision(0, "target", "disk")
        send_report(Directive("engine", "host", {}, "group", report=str(receiver.path)), decision)
        assert receiver.take() == [decision]


def test_who_asks_and_goes_does_no_harm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, Receiver(port) as receiver:
        sock = transport.connect(receiver.path, time.monotonic() + SECONDS)
        transport.send_packet(sock, encode_report(ListenerWanted(1)))
        sock.close()
        assert receiver.take() == [ListenerWanted(1)]
