"""`wcache doctor`: the units of agents and loaders, and the manager's descriptor store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.cli.systemd import LOADER_SOCKET, Unit, Units
from weightcache.monitor.view import RankView
from weightcache.protocol import RankStatus
from weightcache.text import count

STORED_BESIDE_ARENAS = 2
"""A set's manifest and its record."""

STORED_BESIDE_SETS = 2
"""The descriptor by which the agent sees that the store holds, and its successor."""

LARGEST_SET = 256
"""Descriptors that the store needs for any set that can be handed over at all."""

MANY_RESTARTS = 3


def down(rank: int, units: Units) -> Finding | None:
    """Why a rank's agent does not answer, where its units say so."""
    service, listener = units.service(rank), units.socket(rank)
    if service is None or listener is None:
        return None
    unit, subject = f"weightcache@{rank}", f"rank {rank}"
    said = f"systemctl status {unit}; journalctl -u {unit}"
    if service["SubState"].startswith("auto-restart") or service["ActiveState"] == "failed":
        again = f" after {count(service.number('NRestarts'), 'restart')}" if service.number("NRestarts") else ""
        return problem(subject, f"the agent ended: {service.name} is {service.state}{again}", said)
    if service["ActiveState"] != "inactive":
        return problem(subject, f"{service.name} is {service.state}, and its agent does not answer", said)
    if listener.active:
        text = f"not started: {listener.name} listens, and the first engine that asks starts the agent"
        return note(subject, text, f"systemctl start {unit} starts it now")
    if "masked" in (service["LoadState"], listener["LoadState"]):
        return problem(subject, "its units are masked", f"systemctl unmask {listener.name} {service.name}")
    if listener["ActiveState"] == "failed":
        text = f"{listener.name} failed ({listener['Result']}): nobody can attach"
        return problem(subject, text, f"systemctl reset-failed {listener.name}, then systemctl start {listener.name}")
    return problem(subject, f"stopped: {listener.name} does not listen", f"systemctl enable --now {listener.name}")


def units(views: Sequence[RankView], found: Units) -> Iterator[Finding]:
    """What is wrong with the units. Says nothing of ranks without."""
    if found.silent:
        yield note("systemd", "systemctl does not answer", "a long daemon-reload, or a system that is overloaded?")
    for view in views:
        rank = view.status.rank
        if service := found.service(rank):
            yield from _service(view, service)
            yield from _boot(rank, found)
    if found.loader_socket:
        yield from _loader_socket(found.loader_socket, views, found)


def _service(view: RankView, service: Unit) -> Iterator[Finding]:
    subject, status = service.name, view.status
    if service["LoadState"] == "masked":
        if service.active:
            text = "masked while the agent runs: systemd dropped its descriptors, and the weights would not outlive it"
            yield problem(subject, text, f"systemctl unmask {subject}: the agent stores them again within a minute")
        return  # without a file, all other properties mean nothing
    # Before anything else: what systemd says may not be what the files say.
    if service["NeedDaemonReload"] == "yes":
        advice = "systemctl daemon-reload; the store stays, unless FileDescriptorStoreMax= became smaller"
        yield note(subject, "the unit's files changed and systemd has not read them", advice)
    yield from _store(status if view.agent == "up" else None, service)
    wrong = []
    if service["Restart"] not in ("always", ""):
        wrong.append(f"Restart={service['Restart']}")
    if service["RestartPreventExitStatus"]:
        wrong.append(f"RestartPreventExitStatus={service['RestartPreventExitStatus']}")
    if wrong:
        text = f"{' and '.join(wrong)}: an agent that ends is not started again, and the weights go with it"
        yield problem(subject, text, f"take it out of the drop-in (systemctl cat {subject}), then daemon-reload")
    if service["FileDescriptorStorePreserve"] == "yes":
        text = "FileDescriptorStorePreserve=yes: systemctl stop does not free the weights"
        yield note(
            subject, text, f"`wcache drain` before a stop, or afterwards systemctl clean --what=fdstore {subject}"
        )
    if service["ActiveState"] in ("inactive", "failed") and (left := service.number("NFileDescriptorStore")):
        text = f"systemd keeps {count(left, 'descriptor')} of weights although no agent runs"
        yield note(subject, text, f"systemctl start {subject} goes on with them")
    if (restarts := service.number("NRestarts")) >= MANY_RESTARTS:
        yield note(subject, f"systemd restarted the agent {restarts} times", f"journalctl -u {subject} says why")


def _store(status: RankStatus | None, service: Unit) -> Iterator[Finding]:
    if not service["FileDescriptorStoreMax"]:
        return
    most, stored = service.number("FileDescriptorStoreMax"), service.number("NFileDescriptorStore")
    sets = status.sets if status else ()
    wanted = sum(entry.arenas + STORED_BESIDE_ARENAS for entry in sets)
    needed = wanted + STORED_BESIDE_SETS
    raise_it = f"systemctl edit {service.name}: [Service] FileDescriptorStoreMax={max(1024, 2 * needed)}"
    if most < (needed if sets else 1):
        text = f"FileDescriptorStoreMax={most}, and {needed} are needed: the weights would not outlive the agent"
        yield problem(service.name, text, f"{raise_it}; restart nothing before `wcache doctor` is content")
    elif stored < wanted or (status and status.kept == "lost"):
        text = f"systemd holds {stored} descriptors, and the weights have {wanted}: they would not outlive the agent"
        advice = "the agent stores them again by itself when it sees that; if it does not, evict them and load again"
        yield problem(service.name, text, advice)
    elif most < LARGEST_SET:
        text = f"FileDescriptorStoreMax={most} is too small for a large model"
        yield note(service.name, text, f"{raise_it}, then systemctl restart {service.name}")
    else:
        yield ok(service.name, f"{service.state}, systemd holds {count(stored, 'descriptor')} of at most {most}")


def _boot(rank: int, found: Units) -> Iterator[Finding]:
    listener, warm = found.socket(rank), found.warm(rank)
    if listener is None or not listener.active:
        return  # said of its agent
    if not listener.enabled:
        text = "listens, and is not enabled: the rank will be off after a reboot"
        yield note(listener.name, text, f"systemctl enable {listener.name}")
    elif warm and warm.enabled:
        yield ok(listener.name, "enabled; the model is loaded from boot on")
    else:
        yield ok(listener.name, "enabled; after a boot the first engine that asks starts the agent")


def _loader_socket(listener: Unit, views: Sequence[RankView], found: Units) -> Iterator[Finding]:
    services = [found.service(view.status.rank) for view in views]
    if listener.active:
        yield ok(LOADER_SOCKET, "listens")
    elif listener["LoadState"] == "masked":
        text = "masked: nothing can be loaded or verified"
        yield problem(LOADER_SOCKET, text, f"systemctl unmask {LOADER_SOCKET}, then systemctl enable --now it")
    elif any(service and service.active for service in services):
        text = f"{listener.state}: the agents that run can load and verify nothing"
        yield problem(LOADER_SOCKET, text, f"systemctl enable --now {LOADER_SOCKET}")
    elif listener["ActiveState"] == "failed":
        yield problem(LOADER_SOCKET, listener.state, f"systemctl reset-failed {LOADER_SOCKET}, then start it")
    else:
        yield note(LOADER_SOCKET, "does not listen yet; the next agent that starts brings it up")
