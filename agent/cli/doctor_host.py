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
from weightcache.text import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.config import Config

OLDEST_PYTHON = (3, 11)
FILES_WANTED = 1024
SHM_WANTED = 64 * 2**20
DEV = Path("/dev")
PROC = Path("/proc")
PERSISTENCED = Path("/run/nvidia-persistenced/socket")
LIBRARIES = tuple(
    Path(folder)
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64")
)


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


def libraries() -> Iterator[Finding]:
    """The driver's libraries, by their file names: an upgrade replaces them below a module that is still loaded."""
    loaded = _module_version()
    if not loaded:
        return
    for name in ("libcuda", "libnvidia-ml"):
        versions = {found for folder in LIBRARIES if (found := _library_version(folder / f"{name}.so.1"))}
        other = ", ".join(sorted(versions - {loaded}))
        if loaded in versions:
            yield ok(name, f"{loaded}, as the loaded module")
        elif other:
            yield problem(
                name,
                f"{other}, and the loaded module is {loaded}: new engines and loaders fail, those that run go on",
                "what is resident stays good; plan `wcache drain` and then a reboot, or a reload of the module",
            )


def persistence() -> Iterator[Finding]:
    """NVIDIA's persistence daemon, by its socket; a container may not show it."""
    if not _module_version():
        return
    if PERSISTENCED.exists():
        yield ok("nvidia-persistenced", "runs")
    else:
        text = "not seen: a GPU that nobody holds open is set up anew, for seconds, by whoever comes next"
        yield note("nvidia-persistenced", text, "systemctl enable --now nvidia-persistenced")


def _module_version() -> str:
    """The version of the loaded kernel module; empty without one."""
    try:
        line = (PROC / "driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", line)
    return found[1] if found else ""


def _library_version(link: Path) -> str:
    try:
        name = link.resolve(strict=True).name
    except (OSError, RuntimeError):
        return ""
    return name.rpartition(".so.")[2] if re.search(r"\.so\.\d+(\.\d+)+$", name) else ""


def _gpu_uuids() -> Iterator[str]:
    for file in (PROC / "driver/nvidia/gpus").glob("*/information"):
        try:
            text = file.read_text()
        except OSError:
            continue
        if match := re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE):
            yield "GPU-" + match[1][4:].lower()
