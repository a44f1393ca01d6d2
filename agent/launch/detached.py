"""Start agents that outlive this launch: a session of their own, no child of ours, output in a log file.

Each runs under a keeper (keeper.py), which starts it again after a crash and holds its descriptors meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import weightcache
from weightcache import client, protocol, transport
from weightcache.engine.directive import UNPROVEN_VARIABLE
from weightcache.errors import AgentUnavailable, PermissionRefused, WeightcacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weightcache.paths import RankPaths

LOG_LINES = 12
MOST_CRASHES = 5
"""How often an agent may end before it answers for the first time."""
_START_TIMEOUT = 30.0
_ANSWER_TIMEOUT = 0.5
_STOP_SECONDS = 5.0
# The service manager of this launch, if it has one, is not the agent's; and a comparison says in its agent's
# configuration that methods without evidence are allowed, while no other agent may inherit that.
_NOT_THE_AGENTS = ("NOTIFY_SOCKET", UNPROVEN_VARIABLE)
_KEEPER = Path(weightcache.__file__).with_name("keeper.py")
# Not -m: where packages installed it, only the programs know where weightcache is.
_AGENT = "import sys; sys.path[:] = {path!r}; from weightcache.server.__main__ import main; sys.exit(main())"
# An intermediate process that ends at once makes init the parent: nobody here has to reap it.
_INTERMEDIATE = (
    "import subprocess, sys; "
    "p = subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=sys.stderr); print(p.pid, flush=True); "
    "p.returncode = 0"
)
_CRASH = re.compile(r"^keeper: (\d+ ended|cannot start)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Detached:
    """What was started for one rank: the keeper of its agent, or the agent itself if it has none."""

    where: RankPaths
    pid: int
    pidfd: int

    def wait(self, deadline: float) -> None:
        """Wait until the agent answers. Raises AgentUnavailable with the end of its log."""
        # Not at the public socket: that is the keeper's, and takes connections while no agent runs.
        while not _answers(self.where):
            what = ""
            if self.ended(0):
                what = "ended at once"
            elif len(_CRASH.findall(_log(self.where))) >= MOST_CRASHES:
                what = "ends again and again"
            elif time.monotonic() > deadline:
                what = f"does not answer at {self.where.status}"
            if what:
                raise AgentUnavailable(f"the agent of rank {self.where.rank} {what}: {last_lines(self.where)}")
            time.sleep(0.05)

    def ended(self, seconds: float) -> bool:
        """Whether the process has ended, now or within ``seconds``."""
        return _ended(self.pidfd, seconds)

    def terminate(self) -> None:
        """SIGTERM; a keeper that gets a second one kills its agent."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)


def can_keep() -> bool:
    """Whether agents can run under a keeper here: they need a package to talk to it."""
    return importlib.util.find_spec("sdnotify") is not None


def log_file(where: RankPaths) -> Path:
    """Where a detached agent and its keeper write."""
    return where.directory / f"{where.rank}.log"


def start(where: RankPaths, config: Path, keep: bool) -> Detached:
    """Start the agent of one rank, under a keeper if ``keep``. Raises AgentUnavailable."""
    agent = _AGENT.format(path=sys.path)
    command = [sys.executable, "-c", agent, "--rank", str(where.rank), "--config", str(config)]
    # No --load: the launcher asks for the load itself, and so hears the answer of exactly that load.
    command += ["--runtime-dir", str(where.directory)]
    if keep:
        options = ["--listen", str(where.public), "--mode", "0660"]
        command = [sys.executable, "-I", "-S", str(_KEEPER), *options, "--", *command]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(log_file(where), flags, 0o600)
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _INTERMEDIATE, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=_START_TIMEOUT,
            check=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _NOT_THE_AGENTS},
        )
        pid = int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise AgentUnavailable(f"the agent of rank {where.rank} could not be started, see {log_file(where)}") from None
    finally:
        os.close(log)
    try:
        return Detached(where, pid, os.pidfd_open(pid))
    except ProcessLookupError:
        raise AgentUnavailable(f"the agent of rank {where.rank} ended at once: {last_lines(where)}") from None


def stop(started: Iterable[Detached]) -> None:
    """End what was started: in order, and with the agents' SIGKILL if that takes long."""
    for _ in range(2):
        for one in started:
            one.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        if all(one.ended(max(0.0, deadline - time.monotonic())) for one in started):
            return


def listener(path: Path) -> int | None:
    """The process that made the socket listen (0 if it is none of this namespace); None if nobody listens there."""
    try:
        with transport.connect(path, time.monotonic() + _ANSWER_TIMEOUT) as sock:
            return transport.peer_credentials(sock)[0]
    except (AgentUnavailable, PermissionRefused):
        return None


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not, and on some systems nobody reaps it soon."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not _ended(fd, 0)
    finally:
        os.close(fd)


def last_lines(where: RankPaths) -> str:
    """The end of the log, for an error's sentence."""
    return "; ".join(_log(where).splitlines()[-LOG_LINES:])


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _log(where: RankPaths) -> str:
    try:
        return log_file(where).read_text(errors="replace")
    except OSError:
        return ""


def _answers(where: RankPaths) -> bool:
    try:
        with client.Conversation(where.status, _ANSWER_TIMEOUT) as conversation:
            conversation.request(protocol.Status(), protocol.RankReport, _ANSWER_TIMEOUT)
    except WeightcacheError:
        return False
    return True


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
