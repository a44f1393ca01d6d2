"""Run the server once as a child: pass signals on, hand reports over as they come, end its tree when told to."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightcache.launch import proof
from weightcache.launch.child import fresh
from weightcache.launch.console import say
from weightcache.launch.processes import Tree, below
from weightcache.launch.signals import ENDING, SignalEvents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightcache.engine.directive import Report
    from weightcache.launch.child import Child, Starter
    from weightcache.launch.reports import Receiver

SERVING_POLL = 1.0
KILL_TIMEOUT = 60.0
"""A process with gigabytes on a GPU takes its time to go away."""
REAP_TIMEOUT = 1.0
"""For one that is gone, or will not go."""


class Watcher(Protocol):
    """Who hears about the run. An answer other than None: end the server when so many seconds have passed."""

    def on_report(self, report: Report) -> float | None:
        """A report came."""

    def on_serving(self) -> float | None:
        """The server listens on its port, and ``wants_serving`` was true."""

    @property
    def wants_serving(self) -> bool:
        """Whether it still matters if the server listens."""


class Beside(Protocol):
    """What the launcher looks after while a server runs."""

    def attend(self, server: int) -> float:
        """Called with the server's process number, again after so many seconds as it answers."""


class Aside(Protocol):
    """Who talks with the server's processes while it runs, and is answered at once."""

    def begin(self) -> None:
        """A server is about to be started."""

    def fileno(self) -> int:
        """Readable when ``attend`` has something to do."""

    def due(self) -> float:
        """When ``attend`` has something to do all the same, on CLOCK_MONOTONIC."""

    def attend(self) -> float | None:
        """Do it. As the answers of a Watcher."""

    def may_end(self) -> bool:
        """A signal to end came: whether the server may have it yet. Asked again after each ``attend``."""

    def killing(self) -> None:
        """The server is about to be killed, which may take KILL_TIMEOUT; ``attend`` is not called any more."""

    def ended(self) -> None:
        """The server's main process is gone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the run ended: exit status, or minus the signal's number. ``interrupted``: a signal to end was passed on."""

    status: int
    interrupted: bool
    killed: bool
    """Whether the watcher's deadline ended it."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    receiver: Receiver,
    watcher: Watcher,
    port: int | None,
    start: Starter = fresh,
    beside: Beside | None = None,
    aside: Aside | None = None,
) -> Ended:
    """Run ``command`` until it ends. Raises UsageError if it cannot be started."""
    with SignalEvents() as signals, selectors.DefaultSelector() as selector, contextlib.ExitStack() as after:
        if aside is not None:
            aside.begin()
            after.callback(aside.ended)
        child = start(command, environment, signals.child_setup())
        run_ = _Run(child, signals, receiver, watcher, port, beside, aside)
        after.callback(run_.close)
        pidfd = os.pidfd_open(child.pid)
        after.callback(os.close, pidfd)
        selector.register(signals, selectors.EVENT_READ)
        selector.register(receiver, selectors.EVENT_READ)
        selector.register(pidfd, selectors.EVENT_READ)
        if aside is not None:
            selector.register(aside, selectors.EVENT_READ)
        return run_.loop(selector, pidfd)


class _Run:
    def __init__(
        self,
        child: Child,
        signals: SignalEvents,
        receiver: Receiver,
        watcher: Watcher,
        port: int | None,
        beside: Beside | None,
        aside: Aside | None,
    ) -> None:
        self.child = child
        self.signals = signals
        self.interrupted: signal.Signals | None = None
        """The last signal to end that came."""
        self.left = False
        """Whether the server's main process is there still, and nobody waits for it any more."""
        self.receiver = receiver
        self.watcher = watcher
        self.port = port
        self.tree = Tree(child.pid)
        self.tree.update()  # while there may be a descriptor to hold it by
        self.deadline: float | None = None
        self.next_poll = time.monotonic() + SERVING_POLL
        self.seen_serving = False
        self.beside = beside
        self.next_attended = time.monotonic()
        self.aside = aside
        self.withheld: signal.Signals | None = None
        """A signal to end, which the server gets when ``aside`` lets it end."""

    def loop(self, selector: selectors.BaseSelector, pidfd: int) -> Ended:
        killed = False
        while True:
            ready = {key.fd for key, _ in selector.select(self._timeout())}
            if self.signals.fd in ready:
                for number, forward in self.signals.take():
                    self.interrupted = number if number in ENDING else self.interrupted
                    if forward:
                        self._pass(number)
            self._reports()
            self._look_aside()
            if pidfd in ready:
                break
            self._poll()
            self._attend()
            if self.deadline is not None and time.monotonic() >= self.deadline:
                killed = True
                break
        told_to_leave = self.deadline is not None and self._end_tree()
        try:
            status = self.child.wait(REAP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.left = True
            status = -self.interrupted if told_to_leave and self.interrupted else -signal.SIGKILL
        self._reports()
        return Ended(status, self.interrupted is not None, killed and not told_to_leave)

    def _timeout(self) -> float | None:
        moments = [self.receiver.due()]
        if self.deadline is not None:
            moments.append(self.deadline)
        if self._polls():
            moments.append(self.next_poll)
        if self._attends():
            moments.append(self.next_attended)
        if self.aside is not None:
            moments.append(self.aside.due())
        soonest = min(moments)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    def _pass(self, number: signal.Signals) -> None:
        # A second one goes through at once: whoever sends it has seen that the first one takes its time.
        if self.aside is None or number not in ENDING or self.withheld is not None or self.aside.may_end():
            self.withheld = None
            self.child.send_signal(number)
        else:
            self.withheld = number

    def _look_aside(self) -> None:
        if self.aside is None:
            return
        self._end_after(self.aside.attend())
        if self.withheld is not None and self.aside.may_end():
            self.child.send_signal(self.withheld)
            self.withheld = None

    def _polls(self) -> bool:
        return self.port is not None and self.deadline is None and self.watcher.wants_serving

    def _attends(self) -> bool:
        return self.beside is not None and self.deadline is None

    def _attend(self) -> None:
        if self.beside is not None and self._attends() and time.monotonic() >= self.next_attended:
            self.next_attended = time.monotonic() + self.beside.attend(self.child.pid)

    def _reports(self) -> None:
        for report in self.receiver.take():
            self._end_after(self.watcher.on_report(report))

    def _poll(self) -> None:
        if not self._polls() or self.port is None or time.monotonic() < self.next_poll:
            return
        self.next_poll = time.monotonic() + SERVING_POLL
        serving = proof.listens(below(self.child.pid), self.port)
        if serving and self.seen_serving:  # twice: a report that was sent just before has arrived by now
            self._end_after(self.watcher.on_serving())
        self.seen_serving = serving

    def _end_after(self, seconds: float | None) -> None:
        if seconds is None:
            return
        # Hold the processes now: once the server's main process is gone, nothing leads to its orphans any more.
        self.tree.update()
        moment = time.monotonic() + seconds
        self.deadline = moment if self.deadline is None else min(self.deadline, moment)

    def _end_tree(self) -> bool:
        """Kill everything, and see it gone; True if a second signal to end came before, which is for the launcher.

        What the kernel does not let go, as in a driver that hangs, ends by no signal.
        """
        if self.aside is not None:
            self.aside.killing()
        self.tree.strike()
        if self.child.pid not in {process.pid for process in self.tree.held} and self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)  # there was no descriptor to hold it by
        deadline = time.monotonic() + KILL_TIMEOUT
        while not self.tree.wait(max(0.0, deadline - time.monotonic()), self.signals.fd):
            if self._told_to_leave():
                say("some of the server's processes do not end: the launcher ends without them")
                return True
            if time.monotonic() >= deadline:
                say(f"some of the server's processes do not end within {KILL_TIMEOUT:.0f} s")
                break
        return False

    def _told_to_leave(self) -> bool:
        for number, _ in self.signals.take():
            if number in ENDING:
                before, self.interrupted = self.interrupted, number
                if before is not None:
                    return True
                say("the server is being killed: another signal ends the launcher, whether that is done or not")
        return False

    def close(self) -> None:
        """Whatever happened, leave no server behind that can be ended."""
        if not self.left and self.child.poll() is None:
            self._end_tree()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(REAP_TIMEOUT)
        self.tree.close()
