"""The ``doctor`` role: what the loader's environment has and lacks, one JSON object a line.

``wcache doctor`` starts it, because only this environment knows its torch, its SGLang and its GPUs. SGLang itself is
not imported: that takes half a minute, and its metadata says enough.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.errors import WeightcacheError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

DESCRIPTION = "Say what this environment has and lacks, one JSON object a line."

PROVEN = ("0.5.17", "0.5.23")
"""SGLang releases that weightcache's tests run."""

OLDEST_PYTHON = (3, 11)
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "weightcache"
PERSISTENCE_SOCKET = Path("/run/nvidia-persistenced/socket")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: ``status`` is ok, problem or note; ``advice`` says what to do, or is empty."""

    status: str
    subject: str
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the role's arguments."""
    parser.add_argument("--backend", choices=("host", "cuda"), help="the configured kind of memory (default: any)")
    parser.add_argument("--json", action="store_true", help="print JSON lines (always so)")


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come: 0 without a problem, else 1. Never raises."""
    problems = 0
    for finding in examine(args.backend or ""):
        problems += finding.status == "problem"
        print(json.dumps(asdict(finding)), flush=True)
    return 1 if problems else 0


def examine(backend: str = "") -> Iterator[Finding]:
    """All findings; ``backend`` cuda makes a missing GPU a problem instead of a note."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("torch", lambda: _torch(backend)),
        ("sglang", _sglang),
        ("bytecode", _bytecode),
        ("plugin", _plugin),
        ("cuda-bindings", lambda: _bindings(backend)),
        ("gpu", lambda: _gpus(backend)),
        ("host memory", _host_memory),
    )
    for subject, check in checks:
        try:
            yield from check()
        except WeightcacheError as error:
            yield Finding("problem", subject, error.message)
        except Exception as error:  # noqa: BLE001 - a broken environment breaks in any way, and that is the finding
            first = (str(error).strip().splitlines() or [""])[0]
            yield Finding("problem", subject, f"{type(error).__name__}: {first}", "repair this environment")


def _python() -> Iterator[Finding]:
    text = f"Python {platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("problem", "python", text, f"weightcache needs {'.'.join(map(str, OLDEST_PYTHON))} or later")
    else:
        yield Finding("ok", "python", text)


def _torch(backend: str) -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        yield Finding("problem", "torch", f"cannot be imported ({error})", "loader.command needs SGLang's environment")
        return
    if torch.cuda.is_available():
        yield Finding("ok", "torch", f"torch {torch.__version__} with CUDA {torch.version.cuda}")
    else:
        yield _absent(backend, "torch", f"torch {torch.__version__} sees no CUDA device", "look at the driver")


def _sglang() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("problem", "sglang", "SGLang is not installed here", "pip install sglang, or set loader.command")
        return
    if version in PROVEN:
        yield Finding("ok", "sglang", f"SGLang {version}")
    else:
        yield Finding("note", "sglang", f"SGLang {version} is not proven; {' and '.join(PROVEN)} are")


def _bytecode() -> Iterator[Finding]:
    """Whether importing SGLang has to compile it, which doubles its time: images are often made without bytecode."""
    spec = importlib.util.find_spec("sglang")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    sources = [path for folder in folders for path in Path(folder).rglob("*.py")]
    missing = [path for path in sources if not Path(importlib.util.cache_from_source(str(path))).exists()]
    if len(missing) * 10 <= len(sources):
        return
    text = f"{len(missing)} of {len(sources)} of SGLang's modules have no bytecode"
    advice = f"{sys.executable} -m compileall -q -j 0 {' '.join(map(shlex.quote, folders))}"
    yield Finding("note", "bytecode", f"{text}: a start that cannot write it compiles them again", advice)


def _plugin() -> Iterator[Finding]:
    found = [entry for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN]
    if not found:
        advice = (
            "install weightcache into this environment (pip install --no-deps, and the wheel in /usr/share/weightcache "
            "or the checkout): SGLang finds the plugin by its entry point"
        )
        yield Finding("problem", "plugin", f"no entry point {PLUGIN} in the group {PLUGIN_GROUP}", advice)
        return
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        yield Finding("problem", "plugin", f"SGLANG_PLUGINS={allowed} keeps it out", f"add {PLUGIN} to SGLANG_PLUGINS")
    else:
        yield Finding("ok", "plugin", f"SGLang can find it as {found[0].value}")


def _bindings(backend: str) -> Iterator[Finding]:
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        text = f"cannot be imported ({error}), and GPU memory needs it"
        yield _absent(backend, "cuda-bindings", text, "pip install cuda-bindings")
        return
    yield Finding("ok", "cuda-bindings", f"cuda-bindings {importlib.metadata.version('cuda-bindings')}")


def _gpus(backend: str) -> Iterator[Finding]:
    from weightcache.memory.cuda_vmm import CudaMemory, device_count, device_name, device_uuid

    try:
        count = device_count()
    except WeightcacheError as error:
        yield _absent(backend, "gpu", error.message, "look at nvidia-smi, and at the device's cgroup and container")
        return
    if DRIVER_VERSION.exists():
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", DRIVER_VERSION.read_text())
        yield Finding("ok", "driver", f"NVIDIA driver {found[1] if found else 'of unknown version'}")
    if not PERSISTENCE_SOCKET.exists():
        yield Finding(
            "note",
            "driver",
            "nvidia-persistenced does not run: a GPU that nobody has open may be reset, and its memory lost",
            "enable nvidia-persistenced.service",
        )
    for device in range(count):
        subject = f"gpu {device}"
        try:
            free = CudaMemory(device).free_bytes()
        except WeightcacheError as error:
            yield Finding("problem", subject, error.message)
        else:
            text = f"{device_name(device)}, {device_uuid(device)}, shareable memory, {free / 2**30:.1f} GiB free"
            yield Finding("ok", subject, text)


def _host_memory() -> Iterator[Finding]:
    from weightcache.memory.host import GRANULARITY, HostMemory

    memory = HostMemory()
    region = memory.reserve(GRANULARITY)
    try:
        region.extend(GRANULARITY)
        for fd in region.freeze():
            os.close(fd)
    finally:
        region.close()
    yield Finding("ok", "host memory", f"sealed memory files work, {memory.free_bytes() / 2**30:.1f} GiB available")


def _absent(backend: str, subject: str, text: str, advice: str) -> Finding:
    return Finding("problem", subject, text, advice) if backend == "cuda" else Finding("note", subject, text)
