"""Whether the plugin really decided: a disk load that nobody announced must never pass for an attach.

The plugin reports from every scheduler. A server that listens on its port has loaded its weights, so if no report came
by then, none will.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.engine.directive import Decision, PluginReady

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightcache.engine.directive import Report

GROUP = "sglang.srt.plugins"
PLUGIN = "weightcache"
_LISTEN = "0A"
_PROBE_TIMEOUT = 20.0
_PROBE = (
    "import importlib.metadata as m, sys; "
    f"sys.exit(0 if any(e.name == {PLUGIN!r} for e in m.entry_points(group={GROUP!r})) else 3)"
)


def missing(reports: Iterable[Report]) -> bool:
    """Whether no scheduler has said that the hooks took and how it gets its weights."""
    reports = tuple(reports)
    ready = any(isinstance(report, PluginReady) and report.process == "scheduler" for report in reports)
    return not (ready and any(isinstance(report, Decision) for report in reports))


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of ``pids`` has a TCP socket that listens on ``port``."""
    inodes: set[str] | None = None
    for pid in pids:
        if inodes is None:
            inodes = _listening(pid, port)
            if not inodes:
                return False
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if Path(entry.path).readlink().name in inodes:
                        return True
    return False


def _listening(pid: int, port: int) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def cause(reports: Sequence[Report], python: str, environment: Mapping[str, str]) -> str:
    """Why there is no proof, and what to do about it. Asks the engine's interpreter, so call it only when needed."""
    ready = {report.process for report in reports if isinstance(report, PluginReady)}
    if "scheduler" in ready:
        return "the plugin loaded in the engine, but no rank said how it got its weights: look for errors in the log"
    if ready:
        return (
            "the plugin loaded in the engine's main process but in no scheduler: look for 'plugin' in the server's log"
        )
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError):
        return f"whether the plugin is installed in {python} could not be found out"
    if probe.returncode == 3:
        return (
            f"the plugin is not installed where the engine runs: `{python} -m pip install --no-deps "
            "/usr/share/weightcache/weightcache-*.whl`, or the checkout in its place"
        )
    return (
        f"the plugin is installed in {python} but did not report (its hooks failed, SGLANG_PLUGINS or SGLANG_PLATFORM "
        "excludes it, or this SGLang has no plugins): look for 'plugin' in the server's log"
    )
