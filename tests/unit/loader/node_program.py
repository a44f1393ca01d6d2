"""A loader whose launch is one of CHILDREN: ``python -m tests.unit.loader.node_program CHILD load ...``, no torch."""

from __future__ import annotations

import sys

from weightcache.loader import __main__ as program, load

CHILDREN = {
    "well": "",
    "slow": "time.sleep(60)",
    "status": "raise SystemExit(3)",
    "killed": "os.kill(os.getpid(), 9)",
    "reason": "reasons.leave(reasons.of(NoRoom('40 GB are free, 80 are needed'))); raise SystemExit(1)",
    # A process of its own that outlives the first, as a rank does that waits for the others.
    "leftover": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); raise SystemExit(1)",
    "leftover-slow": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)",
    # What a collective says when the other end of its connection is gone.
    "consequence": "reasons.leave(reasons.of(RuntimeError('Connection closed by peer'))); raise SystemExit(1)",
}
_CHILD = """
import os, subprocess, sys, time
from weightcache.errors import NoRoom
from weightcache.loader import reasons
print("arguments", *sys.argv[1:], "directive", os.environ["WEIGHTCACHE_DIRECTIVE"], flush=True)
print("child", os.getpid(), flush=True)
"""

if __name__ == "__main__":
    load.LAUNCH = ("-c", _CHILD + CHILDREN[sys.argv[1]])
    sys.exit(program.main(sys.argv[2:]))
