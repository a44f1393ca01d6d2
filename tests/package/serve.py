"""A real SGLang on the host, started by the installed wcache-launch: serve.py MODEL LOG.

Runs in the SGLang environment. Prints a JSON line once the server answers, and one more for each line of its standard
input: the greedy text, and what the launcher said. Ends its engine when its standard input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.engine import Engine

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8,"
TOKENS = 8
SECONDS = 400.0
"""For its own start and the load that it waits for, side by side on two cores."""
COMMAND = ("/usr/bin/wcache-launch", "--wcache-wait", "240", "--wcache-on-mismatch", "error")
"""No disk behind it: weights come from the cache, or the engine does not start."""


def main(model: str, log: str) -> None:
    """Serve until standard input ends."""
    arguments, variables = ("--sleep-on-idle",), {"OMP_NUM_THREADS": "1"}
    engine = Engine(Path(model), log=Path(log), command=COMMAND, arguments=arguments, environment=variables)
    try:
        engine.start().wait_ready(SECONDS)
        while True:
            engine.flush()
            said = [line for line in engine.text().splitlines() if line.startswith("weightcache: ")]
            print(json.dumps({"text": engine.generate(PROMPT, TOKENS), "said": said}), flush=True)
            if not sys.stdin.readline():
                return
    finally:
        engine.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
