"""A real SGLang inside a machine, through wcache-launch: engine_client.py MODEL LOG.

Prints a JSON line once it serves, and another one for every line of its standard input: the greedy text, and what the
launcher said. Ends its engine when its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.engine.support import ARGUMENTS, VARIABLES, QuickEngine
from tests.support.environments import environments
from tests.systemd.rank import RUN

PROMPT = "The capital of France is"
TOKENS = 8


def main(model: str, log: str) -> None:
    """Serve until standard input ends."""
    command = (environments().script("wcache-launch"), "--wcache-runtime-dir", RUN, "--wcache-wait", "120")
    with QuickEngine(Path(model), log=Path(log), command=command, arguments=ARGUMENTS, environment=VARIABLES) as engine:
        while True:
            engine.flush()
            said = [line for line in engine.text().splitlines() if line.startswith("weightcache: ")]
            print(json.dumps({"text": engine.generate(PROMPT, TOKENS), "said": said, "pid": os.getpid()}), flush=True)
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
