"""What an engine is to the agent: it attaches, maps the set, keeps its lease, and never asks for the bytes again.

    client.py RANK ROLE    answers each line of its standard input with a line of JSON

Runs inside a machine on the installed package.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from pathlib import Path

sys.path[:0] = ["/usr/lib/weightcache", str(Path(__file__).resolve().parents[2])]

from tests.support import test_loader  # noqa: E402
from weightcache import protocol, transport  # noqa: E402
from weightcache.client import Conversation  # noqa: E402
from weightcache.engine.lease import Lease  # noqa: E402
from weightcache.paths import SYSTEM_RUNTIME_DIR, RankPaths  # noqa: E402

SECONDS = 30.0


def main() -> None:
    """Attach, then answer until the input ends."""
    rank, role = int(sys.argv[1]), sys.argv[2]
    path = RankPaths(SYSTEM_RUNTIME_DIR, rank).public
    conversation = Conversation(path)
    conversation.send(protocol.Attach(role, "client", test_loader.fingerprint(role=role), SECONDS))
    while True:
        message, fds = conversation.receive(SECONDS, transport.MAX_FDS)
        if isinstance(message, protocol.Attached):
            break
    mapped = [
        mmap.mmap(fd, arena.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
        for fd, arena in zip(fds[1:], message.arenas, strict=True)
    ]
    transport.close_all(fds)
    lease = Lease(path, message.set_id, role, conversation)
    for _ in sys.stdin:
        digests = [hashlib.sha256(part).hexdigest()[:32] for part in mapped]
        print(json.dumps({"set": lease.set_id, "pid": os.getpid(), "digests": digests}), flush=True)


if __name__ == "__main__":
    main()
