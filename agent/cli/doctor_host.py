"""`wcache doctor`: this machine. GPUs are looked at from outside only (device nodes, /proc): none is opened."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.cli.text import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.config import Config

OLDEST_PYTHON = (3, 11)
FILES_WANTED = 1024
SHM_WANTED = 64 * 2**20
DEV = Path("/dev")
PROC = Path("/proc")


def python() -> Finding:
    """The interpreter of agent and commands."""
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return problem("python", text, "weightcache needs Python 3.11 or newer")
    return ok("python", text)


def limits() -> Iterator[Finding]:
    """Open files: an engine receives one descriptor an arena."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        more = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
        advice = f"ulimit -n {FILES_WANTED}" if more else "raise the hard limit (limits.conf, LimitNOFILE=)"
        yield problem("open files", f"this user's limit is {shown}, which sets with many arenas can exceed", advice)
    else:
        yield ok("open files", f"limit {shown}")


def memory(wanted: int) -> Iterator[Finding]:
    """Memory of this machine, for the host backend. ``wanted``: bytes of the checkpoint, 0 when unknown."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (PROC / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        yield note("memory", "the kernel does not say how much is available")
    else:
        free = int(found[1]) * 1024
        text = f"{size(free)} available"
        if wanted > free:
            yield note(
                "memory",
                f"{text}, and the checkpoint has {size(wanted)}",
                "fine if it is resident already; else free memory or hold a smaller model",
            )
        else:
            yield ok("memory", text)
    shm = DEV / "shm"
    try:
        stat = os.statvfs(shm)
    except OSError as error:
        yield problem(str(shm), f"cannot be used ({error.strerror})", f"mount a tmpfs at {shm}: engines need it")
        return
    free = stat.f_bavail * stat.f_frsize
    if free < SHM_WANTED:
        yield problem(
            str(shm), f"{size(free)} free", "engines exchange data there: make room, or give a container --shm-size=1g"
        )
    else:
        yield ok(str(shm), f"{size(free)} free (weights are kept in memfds and do not count against it)")


def devices(config: Config) -> Iterator[Finding]:
    """The NVIDIA driver and its device nodes, for the cuda backend."""
    version = PROC / "driver/nvidia/version"
    try:
        line = version.read_text().partition("\n")[0]
    except OSError:
        yield problem(
            "NVIDIA driver",
            "not loaded (no /proc/driver/nvidia)",
            "install the driver or load it (modprobe nvidia), or use the host backend: "
            "wcache config set memory.backend host",
        )
        return
    match = re.search(r"\s(\d+(?:\.\d+)+)\s", line)
    yield ok("NVIDIA driver", match[1] if match else line)
    nodes = [DEV / "nvidiactl", DEV / "nvidia-uvm", *sorted(DEV.glob("nvidia[0-9]*"))]
    if len(nodes) == 2:
        nodes.append(DEV / "nvidia0")
    for node in nodes:
        if not node.exists():
            yield problem(str(node), "does not exist", "nvidia-modprobe -u -c 0 creates the device nodes")
        elif not os.access(node, os.R_OK | os.W_OK):
            yield problem(str(node), "this user may not open it", f"ls -l {node}: join the group that may, or ask root")
        else:
            yield ok(str(node), "can be opened")
    present = set(_gpu_uuids())
    for entry in config.ranks:
        if entry.gpu.startswith("GPU-") and present:
            if entry.gpu in present:
                yield ok(f"rank {entry.rank}", f"{entry.gpu} is present")
            else:
                yield problem(
                    f"rank {entry.rank}",
                    f"{entry.gpu} is not in this machine",
                    f"present: {', '.join(sorted(present))}",
                )


def _gpu_uuids() -> Iterator[str]:
    for file in (PROC / "driver/nvidia/gpus").glob("*/information"):
        try:
            text = file.read_text()
        except OSError:
            continue
        if match := re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE):
            yield "GPU-" + match[1][4:].lower()
