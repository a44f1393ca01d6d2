"""An engine that attaches, forks a helper that inherits the connection, and waits to be killed."""

from __future__ import annotations

import os
import signal

from tests.support.test_loader import fingerprint
from weightcache import protocol, transport
from weightcache.client import Conversation


def attach_and_fork(path: str) -> None:
    conversation = Conversation(path)
    conversation.send(protocol.Attach("target", "g", fingerprint(), 10.0))
    message, _ = conversation.receive(max_fds=transport.MAX_FDS)
    assert isinstance(message, protocol.Attached)
    if helper := os.fork():
        print(helper, flush=True)
    signal.pause()
