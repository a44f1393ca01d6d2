"""One launch: run the server under a directive, say how each rank got its weights, fall back to disk at most once."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from weightcache import sglang_options
from weightcache.engine.directive import UNPROVEN_VARIABLE, Decision, Directive, Milestone
from weightcache.errors import AgentUnavailable, from_code
from weightcache.launch import child, decisions, proof, served, server_only, supervisor
from weightcache.launch.console import say, write
from weightcache.launch.listener import DEFAULT_PORT
from weightcache.launch.reports import Receiver
from weightcache.launch.signals import die_by
from weightcache.starts import reading
from weightcache.starts.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightcache.engine.directive import Report
    from weightcache.launch.slot import Slot

FAILED_GRACE = 3.0
"""An engine whose attach failed ends itself and says why; after this it is ended."""
OTHERS_GRACE = 30.0
"""How long the other ranks may take to say what they decided, when the engine is going to end anyway."""
PLUGINS = "SGLANG_PLUGINS"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run. ``strict``: rather no server than one whose weights came another way (mode error or daemon)."""

    python: str
    arguments: tuple[str, ...]
    directive: Directive
    strict: bool
    port: int | None = DEFAULT_PORT
    ranks: int = 1
    """How many ranks of this launch are on this host."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the server's environment gets besides the directive."""
    listener: socket.socket | None = None
    """The HTTP port, where the launcher holds it."""
    began: float | None = None
    """What this start is counted from, on CLOCK_MONOTONIC: the moment that it is served, if None."""
    slot: Slot | None = None
    """The slot that the engine is in, which gives it the port when its turn comes."""

    @property
    def command(self) -> list[str]:
        """The server's command line."""
        return [self.python, "-m", "sglang.launch_server", *self.arguments]


def environment(operator: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """The operator's environment plus exactly what this launch adds, without what is only for a comparison's loader."""
    result = {**operator, **launch.variables, **launch.directive.environment()}
    result.pop(UNPROVEN_VARIABLE, None)
    chosen = operator.get(PLUGINS, "")
    if chosen and proof.PLUGIN not in (name.strip() for name in chosen.split(",")):
        result[PLUGINS] = f"{chosen},{proof.PLUGIN}"
    return result


@dataclass(slots=True)
class _Watcher:
    launch: Launch
    recorder: Recorder = field(default_factory=Recorder)
    reports: list[Report] = field(default_factory=list)
    unproven: bool = False
    failed: Decision | None = None
    refused: Decision | None = None

    @property
    def wants_serving(self) -> bool:
        return not self.unproven and proof.missing(self.reports)

    def on_report(self, report: Report) -> float | None:
        self.reports.append(report)
        if isinstance(report, Milestone):
            for sentence in served.news(report, self.recorder):
                say(sentence)
        if not isinstance(report, Decision):
            return None
        self.recorder.weights(report.rank, report.role, report.outcome, report.milliseconds)
        explaining = report.outcome == "explained"
        if not explaining:
            say(decisions.line(report))
            _table(report, sys.stderr)
        if report.outcome == "failed":
            self.failed = self.failed or report
            return FAILED_GRACE
        if report.outcome == "refused":
            self.refused = self.refused or report
            return self._until_all(report)
        return self._until_all(report) if explaining else None

    def _until_all(self, report: Decision) -> float:
        said = {r.rank for r in self.reports if isinstance(r, Decision) and r.outcome == report.outcome}
        # At once: a scheduler that ends before it is ready makes SGLang print tracebacks that explain nothing.
        return 0.0 if len(said) >= self.launch.ranks else OTHERS_GRACE

    def on_serving(self) -> float | None:
        self.unproven = True
        complain(self.launch, self.reports, serving=True)
        return 0.0 if self.launch.strict else None


def complain(launch: Launch, reports: list[Report], serving: bool) -> None:
    """Say loudly that nobody said how the weights came, and what to do."""
    env = environment(os.environ, launch)
    what = (
        "the server serves, but not through weightcache: its weights were loaded from disk"
        if serving
        else "the server ended without a word from weightcache inside it"
    )
    if launch.listener is not None and not serving:
        what += " (without which it cannot listen: this launcher holds its port)"
    say(f"WARNING: {what}; {proof.cause(reports, launch.python, env)}")


@dataclass(frozen=True, slots=True)
class Served:
    """How a server ended. ``status``: the launcher's exit status, or minus the number of the signal that ended it."""

    status: int
    interrupted: bool
    """Whether a signal that the launcher passed on asked for it."""
    weights: bool
    """Whether every rank of this host came so far that it had weights."""
    serving: bool
    """Whether the server said that it serves; some kinds never do (docs/starts.md)."""


def serve(launch: Launch, start: child.Starter = child.fresh, beside: supervisor.Beside | None = None) -> Served:
    """Run the server until it ends."""
    port = launch.listener if launch.slot is None else None
    with Receiver(port) as receiver, _recorder(launch) as recorder:
        told = replace(
            launch.directive,
            report=str(receiver.path),
            trace=recorder.trace,
            listener=port is not None,
            slot=launch.slot.told(receiver.directory) if launch.slot is not None else None,
        )
        launch = replace(launch, directive=told)
        watcher = _Watcher(launch, recorder)
        ended = _run(launch, receiver, watcher, start, beside)
        if watcher.failed is not None and not launch.strict and not ended.interrupted:
            reason = watcher.failed.message or watcher.failed.code or "attaching failed"
            say("starting the server again, from disk (this happens once)")
            again = replace(launch.directive, from_disk=reason, group=uuid.uuid4().hex)
            launch = replace(launch, directive=again)
            watcher = _Watcher(launch, recorder)
            ended = _run(launch, receiver, watcher, start, beside)
        recorder.ended(ended.status)
        status = _status(launch, watcher, ended)
    serving = any(isinstance(report, Milestone) and report.name == reading.SERVING for report in watcher.reports)
    return Served(status, ended.interrupted, not proof.missing(watcher.reports), serving)


def _recorder(launch: Launch) -> Recorder:
    """The trace of this start, or one sentence why there is none."""
    model = sglang_options.given(launch.arguments).text("model_path")
    arguments = server_only.without(launch.arguments)
    recorder = Recorder.open(model, arguments, launch.directive.levers, launch.began)
    if recorder.problem:
        say(recorder.problem)
    return recorder


def leave(status: int) -> int:
    """The launcher's exit status; or it dies by the signal that ended the server."""
    return die_by(-status) if status < 0 else status


def explain(launch: Launch) -> int:
    """Run the engine up to its decision and print it: 0 if all ranks would attach, 1 if not."""
    with Receiver() as receiver:
        launch = replace(launch, directive=replace(launch.directive, report=str(receiver.path), explain=True))
        watcher = _Watcher(launch)
        ended = _run(launch, receiver, watcher, child.fresh)
    explained = [report for report in watcher.reports if isinstance(report, Decision)]
    if ended.interrupted:
        return leave(ended.status) or 1
    if not explained:
        complain(launch, watcher.reports, serving=False)
        return AgentUnavailable.exit_status
    for decision in sorted(explained, key=lambda decision: (decision.rank, decision.role)):
        write(decisions.line(decision), sys.stdout)
        _table(decision, sys.stdout)
    equal = all(d.outcome == "explained" and not d.differences and not d.code for d in explained)
    return 0 if equal else 1


def _run(
    launch: Launch,
    receiver: Receiver,
    watcher: _Watcher,
    start: child.Starter,
    beside: supervisor.Beside | None = None,
) -> supervisor.Ended:
    env = environment(os.environ, launch)
    watcher.recorder.attempt()
    return supervisor.run(launch.command, env, receiver, watcher, launch.port, start, beside, launch.slot)


def _status(launch: Launch, watcher: _Watcher, ended: supervisor.Ended) -> int:
    if ended.interrupted and not ended.killed:
        return ended.status
    if watcher.refused is not None:
        return _exit_status(watcher.refused)
    if watcher.failed is not None and launch.strict:
        return _exit_status(watcher.failed)
    if watcher.unproven and ended.killed:
        return AgentUnavailable.exit_status
    if not watcher.unproven and proof.missing(watcher.reports):
        # SGLang's own refusal of its arguments comes before any scheduler: the plugin's word from main shows that.
        own_failure = ended.status != 0 and bool(watcher.reports)
        if not own_failure:
            complain(launch, watcher.reports, serving=False)
            if launch.strict:
                return AgentUnavailable.exit_status
        else:
            say("the server ended before any rank had weights")
    return ended.status


def _exit_status(decision: Decision) -> int:
    return from_code(decision.code, decision.message).exit_status


def _table(decision: Decision, stream: TextIO) -> None:
    if decision.differences:
        write(decisions.differences(decision.differences), stream)
