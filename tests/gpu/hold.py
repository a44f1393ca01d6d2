"""An agent that loads the model and holds it until it is told to stop: hold FOLDER

Other scripts take FOLDER as their --agents, so that several of them in a row need one load. Writes FOLDER/loaded when
the model is there; SIGTERM ends it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import rig

LOAD_SECONDS = 400


@contextlib.contextmanager
def agent(held: Path | None, folder: Path) -> Iterator[Path]:
    """The runtime directory of an agent that holds the model: ``held``, or one in ``folder`` while the block runs."""
    if held is not None:
        yield held
        return
    folder.mkdir(parents=True, exist_ok=True)
    made = rig.Agent(folder, model=True).start()
    try:
        rig.wcache(made, "load", "--wait", str(LOAD_SECONDS))
        yield folder
    finally:
        made.stop()


def main() -> int:
    """Hold it."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    begin = time.monotonic()
    with agent(None, folder):
        (folder / "loaded").write_text(f"{time.monotonic() - begin:.1f}\n")
        while True:
            signal.pause()


if __name__ == "__main__":
    sys.exit(main())
