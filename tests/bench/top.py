"""``python -m tests.bench.top``: what wcache-top costs a host while nothing happens. Prints figures, asserts nothing.

Eight fake ranks with three sets and twenty engines each, looked at every second: without a screen (--json --watch 1)
and with one, in a terminal of 160 by 50. The fake agents say something every ten seconds, as
real ones do. CPU time is that of wcache-top alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.unit.monitor import made
from tests.unit.monitor.made import Watched
from weightcache.protocol import RankStatus

RANKS, SETS, ENGINES = 8, 3, 20
QUIET_SECONDS = 10.0
SETTLE_SECONDS = 5.0
SECONDS = 30.0
SCRIPT = "import sys; from weightcache.tui.main import main; sys.exit(main())"


def status(rank: int, pids: list[int]) -> RankStatus:
    """A rank with all its sets and engines, which are living processes."""
    leases = [made.lease(pid, lease=f"l{rank}-{i}", since=time.time()) for i, pid in enumerate(pids)]
    sets = tuple(
        made.weight_set(id=f"s{rank}{i}", role="target" if i == 0 else f"draft-{i}", leases=tuple(leases[i::SETS]))
        for i in range(SETS)
    )
    return made.status(rank, sets=sets)


@contextlib.contextmanager
def host(folder: Path) -> Iterator[None]:
    """Fake agents of all ranks, and processes that stand for their engines."""
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(ENGINES)]
    agents = [Watched(folder, rank) for rank in range(RANKS)]
    for agent in agents:
        agent.status = status(agent.rank, [sleeper.pid for sleeper in sleepers])
    done = threading.Event()

    def speak() -> None:
        while not done.wait(QUIET_SECONDS):
            for agent in agents:
                agent.say(dataclasses.replace(agent.status, uptime_seconds=time.monotonic()))

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
        for agent in agents:
            agent.close()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def share(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Percent of one core, and resident memory in MB, after it has settled."""
    looked = psutil.Process(process.pid)
    time.sleep(SETTLE_SECONDS)
    before, start = looked.cpu_times(), time.monotonic()
    time.sleep(SECONDS)
    after, seconds = looked.cpu_times(), time.monotonic() - start
    used = after.user + after.system - before.user - before.system
    return 100 * used / seconds, looked.memory_info().rss / 1e6


def batch(command: list[str]) -> tuple[float, float]:
    """Without a screen."""
    with subprocess.Popen([*command, "--json", "--watch", "1"], stdout=subprocess.DEVNULL) as process:
        try:
            return share(process)
        finally:
            process.terminate()


def screen(command: list[str]) -> tuple[float, float]:
    """In a terminal that somebody reads."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=variables) as process:
        os.close(slave)

        def read() -> None:
            with contextlib.suppress(OSError):
                while os.read(master, 65536):
                    pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            return share(process)
        finally:
            process.terminate()
            process.wait(10)
            reader.join()
            os.close(master)


def main() -> int:
    """Measure both."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        config = Path(name) / "weightcache.toml"
        config.write_text('[memory]\nbackend = "host"\n')
        command = [sys.executable, "-c", SCRIPT, "--config", str(config), "--runtime-dir", name]
        with host(Path(name)):
            for label, measure in (("--json --watch 1", batch), ("screen, 160x50", screen)):
                percent, megabytes = measure(command)
                print(f"wcache-top {label}: {percent:.2f} % of one core, {megabytes:.0f} MB resident", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
