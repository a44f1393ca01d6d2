"""A slot's control socket, without a slot: what is answered whatever there is to say."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcache import transport
from weightcache.launch.control import LONGEST_TEXT, Control
from weightcache.standby import fence
from weightcache.standby.control import Command, Reply, decode_reply, encode
from weightcache.standby.status import SlotStatus


@contextlib.contextmanager
def asking(path: Path, control: Control) -> Iterator[socket.socket]:
    """A client that has given a command, which was attended to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5)
        client.connect(str(path))
        client.send(encode(Command("report")))
        control.attend()
        control.attend()
        yield client


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "the status is too large to be sent"), ("it is parked", "it is parked"), ("x" * 2000, "x" * LONGEST_TEXT)],
)
def test_an_answer_that_no_packet_can_hold_goes_without_its_status(tmp_path: Path, text: str, said: str) -> None:
    large = SlotStatus(
        "e", "a", "active", 1.0, fence.identify(os.getpid()), promoted={"x" * transport.MAX_PACKET: 1}
    )  # fmt: skip
    replies = [Reply(False, text, large), Reply(True)]
    path = tmp_path / "e-a.control"
    with contextlib.closing(Control(path, lambda _: replies.pop(0))) as control:
        with asking(path, control) as client:
            assert decode_reply(client.recv(transport.MAX_PACKET)) == Reply(False, said)
        with asking(path, control) as client:
            assert decode_reply(client.recv(transport.MAX_PACKET)) == Reply(True)
