"""`wcache doctor`: whose the memory is that no process seems to own, and what was left for the next agent to find."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightcache import records
from weightcache.cli.findings import Finding, note
from weightcache.cli.systemd import Units, service_name
from weightcache.monitor.site import Site
from weightcache.monitor.view import RankView
from weightcache.protocol import DrainInfo
from weightcache.text import moment, size, user

PROC = Path("/proc")
_MAX_MARKER = 1 << 16


def owners(views: Sequence[RankView], units: Units) -> Iterator[Finding]:
    """One line for each rank that holds weights."""
    for view in views:
        held = sum(entry.bytes for entry in view.status.sets)
        if view.agent == "up" and held:
            yield _owner(view, held, units)


def _owner(view: RankView, held: int, units: Units) -> Finding:
    status, rank = view.status, view.status.rank
    unit = service_name(rank)
    if by_systemd := status.kept == "store" and unit in units.found:
        keeper, short = f"systemd (PID 1) keeps for {unit}", "systemd"
    elif status.kept == "store" and (parent := _parent(status.pid)):
        pid, short = parent
        keeper = f"{short} (pid {pid}) keeps for the agent (pid {status.pid})"
    else:
        keeper, short = f"the agent (pid {status.pid}) keeps", "the agent"
    if status.backend == "host":
        text = (
            f"{size(held)} of memory belong to weights that {keeper}: it counts as Shmem, and as no process's own "
            "until an engine maps it"
        )
    else:
        killed = "end the agent and the engines" if short == "the agent" else "end the engines and free nothing"
        text = (
            f"{size(held)} of GPU memory belong to weights that {keeper}: nvidia-smi shows them without a process, "
            f"lsof and fuser on /dev/nvidia* name {short}, and fuser -k would {killed}"
        )
    advice = f"`wcache drain --rank {rank}` frees them"
    if by_systemd:
        advice += f", then systemctl stop weightcache@{rank}.socket {unit}; "
        advice += "a stop alone frees them too, but when the GPU is ill let no last close be PID 1's: drain first"
    return note(f"memory of rank {rank}", text, advice)


def _parent(pid: int) -> tuple[int, str] | None:
    """The process that started the agent, and so keeps its descriptors: a user's systemd, or a keeper."""
    try:
        found = re.search(r"^PPid:\t(\d+)$", (PROC / str(pid) / "status").read_text(), re.MULTILINE)
        if found is None or found[1] == "0":
            return None
        command = (PROC / found[1] / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    name = Path(command[0].decode(errors="replace")).name
    return int(found[1]), name if name == "systemd" else "wcache keeper"


def markers(site: Site, views: Sequence[RankView]) -> Iterator[Finding]:
    """What an agent that is down left for the next one to find."""
    for view in views:
        if view.agent == "up":
            continue  # it says so itself
        rank = view.status.rank
        paths = site.rank(rank)
        if (body := _marker(paths.drain_marker)) is not None:
            try:
                info = records.from_plain(DrainInfo, body)
                by = f" by {user(info.uid)} at {moment(info.at)}"
            except records.RecordError:
                by = ""
            text = f"drained{by}: the next agent gives nothing out and loads nothing"
            yield note(f"rank {rank}", text, f"start the agent, then wcache resume --rank {rank}")
        if (body := _marker(paths.failed_marker)) is not None:
            said = body.get("message") if isinstance(body, dict) else None
            text = f"the last load failed ({said or 'nobody wrote why'}): an agent that is restarted does not try again"
            yield note(f"rank {rank}", text, "the next attach does, or `wcache load`")


def _marker(path: Path) -> object | None:
    """What a marker says; an empty object if that cannot be read, None without a marker."""
    try:
        with path.open("rb") as file:
            body: object = json.loads(file.read(_MAX_MARKER))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return {} if body is None else body


def suspects(views: Sequence[RankView]) -> Iterator[Finding]:
    """Sets that are being examined; those that are damaged make the rank degraded, which it says."""
    for view in views:
        for entry in view.status.sets:
            if entry.suspect:
                text = f"set {entry.id} is examined before anybody gets it again: {entry.suspect}"
                yield note(f"rank {view.status.rank}", text, "wait; `wcache status` shows what came of it")
