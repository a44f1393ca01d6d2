"""Start agents that outlive this launch: a session of their own, no child of ours, output in a log file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from weightcache.errors import AgentUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightcache.paths import RankPaths

LOG_LINES = 12
_START_TIMEOUT = 30.0
# An intermediate process that ends at once makes init the agent's parent: nobody here has to reap it.
_INTERMEDIATE = (
    "import subprocess, sys; "
    "p = subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=sys.stderr); print(p.pid, flush=True); "
    "p.returncode = 0"
)


def log_file(where: RankPaths) -> Path:
    """Where a detached agent writes."""
    return where.directory / f"{where.rank}.log"


def start(where: RankPaths, config: Path) -> int:
    """Start the agent of one rank and return its process number. Raises AgentUnavailable."""
    command = [sys.executable, "-m", "weightcache.server", "--rank", str(where.rank), "--config", str(config)]
    # No --load: the launcher asks for the load itself, and so hears the answer of exactly that load.
    command += ["--runtime-dir", str(where.directory)]
    log = os.open(log_file(where), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _INTERMEDIATE, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=_START_TIMEOUT,
            check=True,
            start_new_session=True,
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise AgentUnavailable(f"the agent of rank {where.rank} could not be started, see {log_file(where)}") from None
    finally:
        os.close(log)


def last_lines(where: RankPaths) -> str:
    """The end of the agent's log, for an error's sentence."""
    with contextlib.suppress(OSError):
        return "; ".join(log_file(where).read_text(errors="replace").splitlines()[-LOG_LINES:])
    return ""


@contextlib.contextmanager
def exclusive(directory: Path, timeout: float) -> Iterator[None]:
    """Only one launch at a time starts agents in ``directory``. Raises AgentUnavailable after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    fd = os.open(directory / "launch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise AgentUnavailable(
                        f"another launch is starting agents in {directory} and does not end"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
