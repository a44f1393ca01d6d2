"""``--wcache-explain``: what the agents hold and how far it is from this launch, without starting anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weightcache.fingerprint import CONSEQUENCES
from weightcache.launch import decisions, precheck
from weightcache.launch.console import clean, table, write

if TYPE_CHECKING:
    from weightcache.fingerprint import Difference
    from weightcache.launch.sockets import Agent, Agents
    from weightcache.protocol import SetStatus
    from weightcache.sglang_options import Given

HEADER = ("field", "resident", "this launch", "verdict")


def explain(found: Agents, given: Given, refusal: str) -> int:
    """Print it; 0 if nothing speaks against attaching, 1 if something does, 69 without an agent."""
    for rank, error in found.problems:
        _print(f"rank {rank}: {error.message}")
    if not found.agents:
        error = found.missing()
        if not found.problems:
            _print(error.message)
        return error.exit_status
    fine = not found.problems
    if refusal:
        _print(f"{refusal}: this launch would load from disk")
        fine = False
    for agent in found.agents:
        fine = _agent(agent, given) and fine
    return 0 if fine else 1


def early(found: Agents, given: Given) -> list[str]:
    """One sentence for each rank where something is already certain to be in the way."""
    sentences = []
    for agent in found.agents:
        if text := precheck.skew(agent.version):
            sentences.append(f"rank {agent.rank}: {text}")
        names = [row.field for row in certain(agent, given)]
        if names:
            sentences.append(f"rank {agent.rank}: the resident set differs in {', '.join(names)}")
    return sentences


def certain(agent: Agent, given: Given) -> tuple[Difference, ...]:
    """The fields that certainly differ from the newest target set of ``agent``; empty if it holds none."""
    targets = _targets(agent)
    return precheck.differing(precheck.compare(targets[-1].fingerprint, given)) if targets else ()


def _agent(agent: Agent, given: Given) -> bool:
    state = agent.state
    if agent.status and agent.status.progress:
        state += f" ({agent.status.progress.phase}, {agent.status.progress.bytes_done / 1e9:.1f} GB)"
    if agent.status and agent.status.error:
        state += f" ({agent.status.error.message})"
    _print(f"rank {agent.rank}: {state}, {agent.backend} {agent.gpu_uuid}".rstrip())
    fine = agent.state == "ready"
    if text := precheck.skew(agent.version):
        _print(f"rank {agent.rank}: {text}")
    if agent.status is None:
        _print(f"rank {agent.rank}: the agent just started and says no more")
        return fine
    for resident in _targets(agent)[-1:]:
        findings = precheck.compare(resident.fingerprint, given, content=True)
        _print(f"rank {agent.rank}: set {resident.id} version {resident.version}, {resident.bytes / 1e9:.2f} GB")
        rows = []
        for finding in findings:
            row = finding.difference()
            verdict = f"differs: {row.consequence}" if finding.verdict == "differs" else finding.verdict
            launch = "" if finding.launch is None else decisions.shown(finding.launch)
            rows.append((row.field, decisions.shown(row.cached), launch, verdict))
        others = len(CONSEQUENCES) - len(findings)
        write(table(HEADER, rows), sys.stdout)
        write(f"  {others} more fields are {precheck.UNKNOWN} (--wcache-explain=full)", sys.stdout)
        fine = fine and not precheck.differing(findings)
    return fine


def _targets(agent: Agent) -> list[SetStatus]:
    sets = agent.status.sets if agent.status else ()
    return sorted((entry for entry in sets if entry.role == "target"), key=lambda entry: entry.version)


def _print(text: str) -> None:
    write(clean(text), sys.stdout)
