"""The keeper with a window: SIGWINCH makes it write what it has imported and what it has open. Arguments as the keeper.

$PROBE_DUMP names the file. $PROBE_SET holds constants of the keeper that are set otherwise, as JSON, and $PROBE_FORKS
the number of calls of fork() that fail first. After SIGURG the next three messages cannot be received.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEEPER = Path(__file__).parents[3] / "agent" / "keeper.py"
fork = os.fork
failures = [OSError(12, "Cannot allocate memory")] * int(os.environ.get("PROBE_FORKS", 0))


def failing_fork() -> int:
    if failures:
        raise failures.pop()
    return fork()


def break_receiving(receive: Callable[[Any], bool]) -> Callable[[Any], bool]:
    failing: list[BaseException] = []
    signal.signal(signal.SIGURG, lambda *_: failing.extend([MemoryError("none left")] * 3))

    def failing_receive(self: Any) -> bool:
        if failing:
            raise failing.pop()
        return receive(self)

    return failing_receive


def dump(*_: object) -> None:
    path = Path(os.environ["PROBE_DUMP"])
    fds = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    path.with_suffix(".new").write_text(json.dumps({"modules": sorted(sys.modules), "fds": fds}))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    keeper: dict[str, Any] = {"__name__": "keeper", "__file__": str(KEEPER)}
    exec(compile(KEEPER.read_text(), KEEPER, "exec"), keeper)
    keeper.update(json.loads(os.environ.get("PROBE_SET", "{}")))
    os.fork = failing_fork
    keeper["Keeper"].receive = break_receiving(keeper["Keeper"].receive)
    signal.signal(signal.SIGWINCH, dump)
    sys.exit(keeper["main"]())
