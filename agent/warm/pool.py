"""The launcher's one parked tree: started beside a running engine, handed to the next launch, used once.

It belongs to this launcher alone and dies with it (PDEATHSIG), however that ends. Standard library only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from weightcache.errors import AgentUnavailable, WeightcacheError
from weightcache.launch.processes import below
from weightcache.warm import messages, title
from weightcache.warm.key import Key, parked
from weightcache.warm.learned import Learned

if TYPE_CHECKING:
    from weightcache.launch.child import Child, Starter

GOING_SECONDS = 10.0
KILL_SECONDS = 30.0
FIRST_RETRY_SECONDS = 5.0
LAST_RETRY_SECONDS = 600.0
MODULE = "weightcache.warm"

Setup = Callable[[], None]


@dataclass(slots=True)
class _Tree:
    """A parked (or still importing) tree. ``log`` collects what its imports write."""

    key: Key
    main: subprocess.Popen[bytes]
    sock: socket.socket
    log: BinaryIO
    ready: bool = False

    def end(self) -> None:
        """Kill it; its children die with it."""
        self.let_go()
        if self.main.poll() is None:
            self.main.kill()
        self.main.wait(KILL_SECONDS)

    def let_go(self) -> None:
        """What only a parked tree needs."""
        self.sock.close()
        self.log.close()


class Pool:
    """Use ``start`` as the way to start a server (child.Starter), and ``attend`` now and then while it serves."""

    def __init__(
        self,
        fresh: Starter,
        layout: messages.Layout,
        say: Callable[[str], None],
    ) -> None:
        self._fresh = fresh
        self._layout = layout
        self._say = say
        self._tree: _Tree | None = None
        self._launch: tuple[list[str], dict[str, str], Setup] | None = None
        self._learned = Learned()
        self._failures = 0
        self._not_before = 0.0

    @property
    def pids(self) -> frozenset[int]:
        """The parked main process, which belongs to no server."""
        return frozenset({self._tree.main.pid} if self._tree else ())

    def start(self, command: Sequence[str], environment: Mapping[str, str], setup: Setup) -> Child:
        """Hand the launch to the parked tree, or start it afresh. Raises UsageError."""
        self._launch = (list(command), dict(environment), setup)
        if (tree := self._tree) is not None:
            self._tree = None
            try:
                self._hand(tree, command, environment)
            except (WeightcacheError, OSError) as error:
                tree.end()
                self._say(f"no warm worker: {getattr(error, 'message', error)}; starting afresh")
            else:
                return tree.main
        return self._fresh(command, environment, setup)

    def _hand(self, tree: _Tree, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if reason := tree.key.difference(Key.of(command, environment)):
            raise AgentUnavailable(reason)
        if not tree.ready:
            self._hear(tree)
        if not tree.ready:
            raise AgentUnavailable("it has not imported everything yet")
        messages.send(tree.sock, messages.Go(tuple(command), dict(environment)), (0, 1, 2))
        messages.expect(tree.sock, messages.Going, GOING_SECONDS)
        tree.let_go()

    def look(self, server: int) -> None:
        """Learn from a server that is starting; to be called every second or so."""
        self._learned.look(server)

    def attend(self) -> None:
        """Park a tree if there is none, hear whether it is ready, and notice if it ended."""
        if self._tree is None:
            if self._launch is not None and time.monotonic() >= self._not_before:
                self._park(*self._launch)
            return
        if _readable(self._tree.sock):  # it is ready, or it ended
            try:
                self._hear(self._tree)
            except (WeightcacheError, OSError) as error:
                self._lost(self._tree, getattr(error, "message", str(error)))

    def _hear(self, tree: _Tree) -> None:
        if not _readable(tree.sock):
            return
        ready, _ = messages.expect(tree.sock, messages.Ready, GOING_SECONDS)
        tree.ready = True
        self._failures = 0
        self._say(f"warm worker parked: {_cost(tree.main.pid)} (imported in {ready.seconds:.0f} s)")

    def _park(self, command: list[str], environment: dict[str, str], setup: Setup) -> None:
        try:
            self._tree = self._parked(command, environment, setup)
        except (WeightcacheError, OSError) as error:
            self._later(getattr(error, "message", str(error)))

    def _parked(self, command: list[str], environment: dict[str, str], setup: Setup) -> _Tree:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        log = tempfile.TemporaryFile(prefix="wcache-warm-")  # noqa: SIM115  the tree owns it
        with theirs:
            line = [command[0], "-m", MODULE, str(theirs.fileno())]
            try:
                main = subprocess.Popen(
                    [*line, title.padding(line, command)],
                    env=parked(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=setup,
                )
            except (OSError, subprocess.SubprocessError) as error:
                ours.close()
                log.close()
                raise AgentUnavailable(f"{command[0]} cannot be started ({error})") from None
        tree = _Tree(Key.of(command, environment), main, ours, log)
        try:
            changes = self._learned.changes(environment)
            messages.send(ours, messages.Park(tuple(command[3:]), self._layout, changes))
        except BaseException:
            tree.end()
            raise
        return tree

    def _lost(self, tree: _Tree, reason: str) -> None:
        was_ready, last = tree.ready, _last_line(tree)
        tree.end()
        self._tree = None
        self._later(f"the parked processes ended: {reason}" if was_ready else f"{reason}{last}")

    def _later(self, reason: str) -> None:
        pause = min(FIRST_RETRY_SECONDS * 2 ** min(self._failures, 16), LAST_RETRY_SECONDS)
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self._say(f"no warm worker: {reason}; trying again in {pause:.0f} s")

    def close(self) -> None:
        """End what is parked."""
        if self._tree is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._tree.end()
            self._tree = None


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _last_line(tree: _Tree) -> str:
    with contextlib.suppress(OSError, ValueError):
        tree.log.seek(0)
        lines = tree.log.read().decode(errors="replace").split("\n")
        if found := [line.strip() for line in lines if line.strip()]:
            return f" ({found[-1][:200]})"
    return ""


def _cost(main: int) -> str:
    """How much memory the tree takes, shared pages divided among those that map them (PSS)."""
    pids = below(main)
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kib += int(rollup.partition("\nPss:")[2].split()[0])
    return f"{len(pids)} processes, {kib * 1024 / 1e9:.1f} GB"
